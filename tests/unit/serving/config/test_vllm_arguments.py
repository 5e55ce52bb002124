"""What ``model.server_kwargs`` says is what vLLM's own parser reads, whatever kind of argument it is."""

import dataclasses
from typing import Any

import pytest
from vllm import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from serving.config import engine_args
from serving.config.app import AppConfig
from serving.config.base import ConfigError
from serving.config.vllm_arguments import command_line

MODEL = {"profile": "h200_sxm__llama-3.1-8b"}


def parsed(server_kwargs: dict[str, Any], **model: Any) -> Any:
    named = AppConfig.read(MODEL | {"model": {**model, "server_kwargs": server_kwargs}}).server_arguments
    return make_arg_parser(FlexibleArgumentParser()).parse_args(command_line("/models/b", named))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("return_tokens_as_token_ids", True),
        ("allow_credentials", False),
        ("enable_flash_late_interaction", False),  # on by default
        ("trust_request_chat_template", False),
        ("disable_log_stats", True),  # without an opposite
        ("disable_log_stats", False),
        ("max_logprobs", 0),
        ("max_logprobs", -1),
        ("video_pruning_rate", 0.5),
        ("video_pruning_rate", 1e-07),
        ("response_role", "assistant"),
        ("response_role", "-a b=c.d"),
        ("chat_template_content_format", "string"),
        ("default_chat_template_kwargs", {"enable_thinking": False, "a": {"b": [1, None, "ü"]}}),
        ("override_generation_config", {"temperature": 0.5}),
        ("hf_overrides", {"rope_scaling": {"factor": 2.0}}),
        ("limit_mm_per_prompt", {"image": 2}),
        ("allowed_origins", ["https://a.example", "*"]),
        ("allowed_methods", []),
        ("api_key", ["one", "two"]),
        ("allowed_media_domains", ["a.example"]),
        ("middleware", ["a.b", "c.d"]),
        ("middleware", ["a.b"]),
    ],
)
def test_value_comes_back(name: str, value: Any) -> None:
    assert getattr(parsed({name: value}), name) == value


@pytest.mark.parametrize("name", ["max-logprobs", "--max-logprobs", "max_logprobs"])
def test_every_spelling_of_a_name(name: str) -> None:
    assert parsed({name: 3}).max_logprobs == 3


def test_single_value_of_a_list() -> None:
    assert parsed({"api_key": "one"}).api_key == ["one"]


def test_opposite_of_a_flag() -> None:
    assert parsed({"no_allow_credentials": True}).allow_credentials is False
    assert parsed({"no_allow_credentials": False}).allow_credentials is True


def test_null_and_empty_are_left_to_vllm() -> None:
    nothing = vars(parsed({}))
    assert vars(parsed({"max_logprobs": None, "revision": "", "api_key": []})) == nothing


def test_settings_of_the_model() -> None:
    args = parsed(
        {"chat_template_content_format": "string"}, id="a/b", served_model_name="b", tool_call_parser="hermes"
    )
    assert (args.model_tag, args.served_model_name, args.max_model_len) == ("/models/b", ["b"], 4096)
    assert (args.tool_call_parser, args.enable_auto_tool_choice, args.chat_template) == ("hermes", True, None)


@pytest.mark.parametrize(
    ("server_kwargs", "told"),
    [
        ({"max_logprob": 3}, "model.server_kwargs.max_logprob: unknown key; did you mean 'max_logprobs'?"),
        ({"zzz": 3}, "model.server_kwargs.zzz: unknown key; vLLM has no such argument"),
        ({"allow_credentials": "no"}, "model.server_kwargs.allow_credentials: must be true or false, got 'no'"),
        ({"max_logprobs": "many"}, "model.server_kwargs: argument --max-logprobs: invalid int value: 'many'"),
        ({"tokenizer_mode": ["a"], "logprobs_mode": "x"}, "model.server_kwargs: argument --logprobs-mode: invalid"),
    ],
)
def test_mistake_names_the_argument(server_kwargs: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as error:
        parsed(server_kwargs)
    assert str(error.value).startswith(told)


def test_what_is_refused_are_names_of_vllm() -> None:
    """A name that a new vLLM no longer has would be refused in vain."""
    of_engines = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    of_servers = {action.dest for action in make_arg_parser(FlexibleArgumentParser())._actions}
    refused = {*engine_args.REFUSED, *engine_args.ELSEWHERE, *engine_args.HARMLESS, *engine_args.SERVES_OWN}
    refused |= {*engine_args.ONLY_FOR_STOCK, *engine_args.SPECULATES, *engine_args.MOVES_KV, *engine_args.ENGINES_ONLY}
    assert not refused - of_engines - of_servers
