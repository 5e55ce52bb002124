"""Adapter: arguments of ``vllm serve`` by name, read by vLLM's own parsers as they were meant. Imports vllm."""

import argparse
import json
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, NoReturn

from pydantic import TypeAdapter, ValidationError
from vllm import AsyncEngineArgs
from vllm.config import CacheConfig, LoRAConfig, ParallelConfig, SchedulerConfig
from vllm.utils.argparse_utils import FlexibleArgumentParser

from profiles.suggest import suggest_near

ENGINE_FIELD = "engine_kwargs"
UNRECOGNIZED = "unrecognized arguments: "
BOUNDED = (CacheConfig, LoRAConfig, ParallelConfig, SchedulerConfig)  # their fields bound the arguments of these names


class Parser(FlexibleArgumentParser):
    """vLLM's, but what is wrong raises ``ValueError`` behind ``field`` instead of ending the process."""

    field = ENGINE_FIELD

    def error(self, message: str) -> NoReturn:
        if message.startswith(UNRECOGNIZED):
            word = message.removeprefix(UNRECOGNIZED).split()[0].partition("=")[0]
            is_flag = word.startswith("-")  # another word may be a secret, such as a second API key
            message = f"{word}: unknown argument; {near_flag(word, self)}" if is_flag else "a word belongs to no flag"
        message = " ".join(message.partition(" [type=")[0].split())  # behind it pydantic quotes the value
        raise ValueError(f"{self.field}: {message}" if self.field else message)


def near_flag(word: str, parser: argparse.ArgumentParser) -> str:
    """A question for the flag that was meant, or that vLLM has none."""
    known = [option for option in options_of(parser) if option.startswith("--")]
    return suggest_near(word.replace("_", "-"), known) or "vLLM has no such argument"


def options_of(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Every spelling of every flag."""
    return {option: action for action in parser._actions for option in action.option_strings}


def engine_arguments(named: Mapping[str, Any]) -> dict[str, Any]:
    """Values for ``AsyncEngineArgs`` as its own parser reads ``named`` (names of Python, values of YAML).

    Raises:
        ValueError: naming the argument that vLLM does not know, or whose value it does not take.
    """
    parser = AsyncEngineArgs.add_cli_args(Parser())
    given = {name: value for name, value in named.items() if value is not None}
    read = vars(only_given(parser).parse_args(words_of(parser, given)))
    check_bounds(read)
    return dict.fromkeys(named) | read


def check_bounds(read: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` for a value outside the bounds that vLLM checks when an engine starts, its parser not."""
    for config in BOUNDED:
        fields = config.__pydantic_fields__
        for name in [name for name in fields.keys() & read.keys() if read[name] is not None]:
            bounds = [bound for bound in fields[name].metadata if type(bound).__module__ == "annotated_types"]
            bounded: Any = Annotated[(fields[name].annotation, *bounds)] if bounds else Any
            try:
                TypeAdapter(bounded).validate_python(read[name])
            except ValidationError as error:
                told = error.errors(include_url=False)[0]["msg"]
                field = f"{ENGINE_FIELD}.{name}"
                raise ValueError(f"{field}: {told[:1].lower()}{told[1:]}, got {read[name]!r}") from None


def only_given(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The parser without defaults, so that its answer has nothing but what was said."""
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    return parser


def words_of(parser: argparse.ArgumentParser, named: Mapping[str, Any], field: str = ENGINE_FIELD) -> list[str]:
    """The command line that says ``named``; raises ``ValueError`` for a name that the parser does not have."""
    options = options_of(parser)
    words: list[str] = []
    for name, value in named.items():
        option = f"--{name.replace('_', '-')}"
        if option not in options:
            known = [option.removeprefix("--").replace("-", "_") for option in options if option.startswith("--")]
            near = suggest_near(name, known) or "vLLM has no such argument"
            raise ValueError(f"{field}.{name}: unknown key; {near}")
        words += _words(option, options[option], value, field)
    return words


def _words(option: str, action: argparse.Action, value: Any, field: str) -> Iterable[str]:
    """One argument; nothing where vLLM's default is meant."""
    if value is None:
        return []
    if action.nargs == 0:
        return _flag(option, action, value, field)
    many = value if isinstance(value, list) else [value]
    if isinstance(action, argparse._AppendAction):
        return [f"{option}={_text(each)}" for each in many]
    if action.nargs == "+":
        return [option, *map(_text, many)] if many else []
    if isinstance(value, list):
        return [f"{option}={_list(action, value)}"]
    return [f"{option}={_text(value)}"]


def _flag(option: str, action: argparse.Action, value: Any, field: str) -> list[str]:
    """``--x``, or for ``false`` its opposite; an option that is off by default has none."""
    if not isinstance(value, bool):
        raise ValueError(f"{field}.{action.dest}: must be true or false, got {value!r}")
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
