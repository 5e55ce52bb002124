"""Adapter: the command line of vLLM's own server, written from a configuration and read from a user. Imports vllm."""

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any

from vllm.entrypoints.launchers.cli_args import make_arg_parser

from replicas.vllm_arguments import Parser, only_given, words_of
from serving.config.base import ConfigError

FIELD = "model.server_kwargs"
PLAIN = (str, int, float, bool, type(None))


class ServerParser(Parser):
    """The parser of ``vllm serve``, whose mistakes name the configuration's key."""

    field = FIELD


class UserParser(Parser):
    """The same for words that a person typed: the message names the flag itself."""

    field = ""


def command_line(location: str, named: Mapping[str, Any]) -> list[str]:
    """Words for vLLM's parser: the model at ``location``, then ``named`` (names of Python, values of YAML).

    Raises:
        ConfigError: naming the argument that vLLM does not know, or whose value it does not take.
    """
    parser = make_arg_parser(ServerParser())
    try:
        words = [location, *words_of(parser, named, FIELD)]
        parser.parse_args(words)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return words


def read_words(words: Sequence[str]) -> dict[str, Any]:
    """What a user typed behind ``polyslo serve``, by the names of Python, with values that YAML can hold.

    Values are checked by vLLM's own parser. An argument with fields of its own (``--compilation-config``) comes back
    as the JSON that was typed, without the defaults of its other fields.

    Raises:
        ConfigError: naming the flag.
    """
    try:
        read = vars(only_given(make_arg_parser(UserParser())).parse_args(list(words)))
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if all(map(_is_plain, read.values())):
        return read
    typed = vars(_untyped(make_arg_parser(UserParser())).parse_args(list(words)))
    return {name: value if _is_plain(value) else _from_json(typed[name]) for name, value in read.items()}


def _untyped(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The parser that leaves every value as the text it was."""
    for action in only_given(parser)._actions:
        action.type = None
        if type(action).__name__ == "LoRAParserAction":
            action.__class__ = argparse._StoreAction
    return parser


def _from_json(text: Any) -> Any:
    if isinstance(text, list):
        return [_from_json(each) for each in text]
    try:
        return json.loads(text)
    except (TypeError, ValueError):
        return text


def _is_plain(value: Any) -> bool:
    if type(value) is dict:
        return all(isinstance(key, str) and _is_plain(each) for key, each in value.items())
    if type(value) is list:
        return all(map(_is_plain, value))
    return type(value) in PLAIN
