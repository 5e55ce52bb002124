"""Adapter: arguments of ``vllm serve`` as a command line that vLLM's own parser reads back as they were meant."""

import argparse
import json
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from profiles.suggest import suggest_near
from serving.config.base import ConfigError

FIELD = "model.server_kwargs"


class Parser(FlexibleArgumentParser):
    """vLLM's, but what is wrong raises instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{FIELD}: {message}")


def command_line(location: str, named: Mapping[str, Any]) -> list[str]:
    """Words for vLLM's parser: the model at ``location``, then ``named`` (names of Python, values of YAML).

    Raises:
        ConfigError: naming the argument that vLLM does not know, or whose value it does not take.
    """
    parser = make_arg_parser(Parser())
    options = {option: action for action in parser._actions for option in action.option_strings}
    words = [location]
    for name, value in named.items():
        option = f"--{name.replace('_', '-')}"
        if option not in options:
            known = [option.removeprefix("--").replace("-", "_") for option in options if option.startswith("--")]
            near = suggest_near(name, known) or "vLLM has no such argument"
            raise ConfigError(f"{FIELD}.{name}: unknown key; {near}")
        words += _words(option, options[option], value)
    parser.parse_args(words)
    return words


def _words(option: str, action: argparse.Action, value: Any) -> Iterable[str]:
    """One argument; nothing where vLLM's default is meant."""
    if value is None:
        return []
    if action.nargs == 0:
        return _flag(option, action, value)
    many = value if isinstance(value, list) else [value]
    if isinstance(action, argparse._AppendAction):
        return [f"{option}={_text(each)}" for each in many]
    if action.nargs == "+":
        return [option, *map(_text, many)] if many else []
    if isinstance(value, list):
        return [f"{option}={_list(action, value)}"]
    return [f"{option}={_text(value)}"]


def _flag(option: str, action: argparse.Action, value: Any) -> list[str]:
    """``--x``, or for ``false`` its opposite; an option that is off by default has none."""
    if not isinstance(value, bool):
        raise ConfigError(f"{FIELD}.{action.dest}: must be true or false, got {value!r}")
    if value:
        return [option]
    if not isinstance(action, argparse.BooleanOptionalAction):
        return []
    return [f"--{option.removeprefix('--no-')}" if option.startswith("--no-") else f"--no-{option[2:]}"]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _list(action: argparse.Action, value: list[Any]) -> str:
    """A list in one word: JSON where vLLM reads it as such, else its items with commas between."""
    text = json.dumps(value)
    try:
        is_json = callable(action.type) and action.type(text) == value
    except (ValueError, argparse.ArgumentTypeError):
        is_json = False
    return text if is_json else ",".join(map(_text, value))
