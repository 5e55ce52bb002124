"""What a configuration says of the model is what vLLM makes of it, in engines and ingresses alike."""

from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm import AsyncEngineArgs
from vllm.config import ModelConfig
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from replicas.config import ReplicaConfig
from replicas.embedded import MAX_MODEL_TOKENS
from replicas.vllm_arguments import engine_arguments
from replicas.vllm_settings import engine_config
from serving.config.app import AppConfig
from serving.config.vllm_arguments import command_line
from serving.config.vllm_check import location_of


def of_server(config: AppConfig) -> ModelConfig:
    words = command_line(location_of(config), config.server_arguments)
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    args.model = args.model_tag
    return AsyncEngineArgs.from_cli_args(args).create_model_config()


def of_engine(config: AppConfig) -> ModelConfig:
    return engine_config(config.replica_config(config.replica_groups()[0]), "link").model_config


def test_engine_and_server_make_the_same_of_a_model() -> None:
    config = AppConfig.read({"engine_kwargs": {"max_model_len": 8192, "hf_overrides": {"rope_theta": 1e4}}})
    server, engine = of_server(config), of_engine(config)
    assert server.max_model_len == engine.max_model_len == 8192
    assert server.hf_config.rope_theta == engine.hf_config.rope_theta == 1e4
    assert of_engine(AppConfig.read({})).max_model_len == 4096


def test_what_is_left_to_vllm_is_its_own() -> None:
    """As on a GPU, whose memory and batches this CPU does not have."""
    made = engine_config(ReplicaConfig(max_model_len=0, max_num_seqs=0, max_num_batched_tokens=0), "link")
    assert made.model_config.max_model_len == MAX_MODEL_TOKENS
    assert made.scheduler_config.max_num_seqs >= 128
    assert made.scheduler_config.max_num_batched_tokens >= 2048


@pytest.mark.parametrize(
    ("named", "told"),
    [
        ({"kv_cache_dtype": "x"}, "engine_kwargs: argument --kv-cache-dtype: invalid choice: 'x'"),
        ({"no_such": 1}, "engine_kwargs.no_such: unknown key"),
        ({"trust_remote_code": "yes"}, "engine_kwargs.trust_remote_code: must be true or false, got 'yes'"),
    ],
)
def test_value_that_vllm_does_not_take_is_named(named: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=r"^engine_kwargs") as error:
        engine_arguments(named)
    assert str(error.value).startswith(told)


def test_none_takes_a_setting_of_ours_back() -> None:
    assert engine_arguments({"scheduler_cls": None, "seed": 3}) == {"scheduler_cls": None, "seed": 3}
