"""``engine_kwargs`` and flags: every argument of vLLM arrives at one key, engines and ingress agree on the model."""

import dataclasses
from typing import Any

import pytest

from serving.config.app import AppConfig
from serving.config.base import ConfigError
from serving.config.engine_args import ONLY_SERVER, SERVES_OWN, SHARED
from serving.config.spread import HOMES, home_of, spread

H200 = {"profile": "h200_sxm__llama-3.1-8b"}


def test_each_argument_moves_to_its_key() -> None:
    told = spread(
        {
            "model": "a/b",
            "engine": {"num_gpus": 2},
            "engine_kwargs": {
                "max_model_len": 8192,
                "--hf-overrides": {"rope_theta": 1e4},
                "max-num-seqs": 7,
                "kv_cache_memory_bytes": 1 << 29,
                "allowed_origins": ["*"],
                "tensor_parallel_size": 2,
                "served_model_name": ["b"],
                "disable_log_stats": True,
            },
        }
    )
    assert told == {
        "model": {
            "id": "a/b",
            "max_model_len": 8192,
            "served_model_name": "b",
            "server_kwargs": {"allowed_origins": ["*"]},
        },
        "engine": {
            "num_gpus": 2,
            "max_num_seqs": 7,
            "kv_cache_gib": 0.5,
            "log_stats_s": 0.0,
            "engine_kwargs": {"hf_overrides": {"rope_theta": 1e4}, "tensor_parallel_size": 2},
        },
    }


def test_the_settings_given_are_left_as_they_were() -> None:
    settings: dict[str, Any] = {"engine": {"engine_kwargs": {"seed": 1}}, "engine_kwargs": {"max_logprobs": 3}}
    spread(settings, {"seed": 2})
    assert settings == {"engine": {"engine_kwargs": {"seed": 1}}, "engine_kwargs": {"max_logprobs": 3}}


def test_what_a_user_types_replaces_what_the_file_says() -> None:
    settings = {"model": {"id": "a", "max_model_len": 1}, "engine": {"engine_kwargs": {"seed": 1}}}
    told = spread(settings, {"model_tag": "b", "max_model_len": 2, "seed": 2})
    assert told == {"model": {"id": "b", "max_model_len": 2}, "engine": {"engine_kwargs": {"seed": 2}}}


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"model": {"max_model_len": 1}, "engine_kwargs": {"max_model_len": 2}}, "engine_kwargs.max_model_len: model."),
        ({"engine_kwargs": 3}, "engine_kwargs: input should be a valid dictionary"),
        ({"engine_kwargs": {"scheduler_cls": "x"}}, "engine.engine_kwargs.scheduler_cls: is how this project"),
        ({"engine_kwargs": {"port": 1}}, "model.server_kwargs.port: has no effect"),
        ({"engine_kwargs": {"hf_token": "s3cret"}}, "engine.engine_kwargs.hf_token: put it into HF_TOKEN"),
        ({"engine": 3, "engine_kwargs": {"max_num_seqs": 1}}, "engine: must hold keys and values"),
        (
            {"model": {"server_kwargs": {"revision": "a"}}, "engine": {"engine_kwargs": {"revision": "b"}}},
            "model.server_kwargs.revision: engine.engine_kwargs.revision says otherwise",
        ),
        (
            {"groups": [{"name": "g", "engine": {"engine_kwargs": {"revision": "b"}}}]},
            "groups.0.engine.engine_kwargs.revision: all groups serve one model",
        ),
    ],
)
def test_mistake_names_the_key(settings: Any, told: str) -> None:
    with pytest.raises(ConfigError) as error:
        AppConfig.read(settings)
    assert str(error.value).startswith(told)
    assert "s3cret" not in str(error.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"engine_kwargs": {"hf_overrides": {"rope_theta": 1e4}}},
        {"engine": {"engine_kwargs": {"hf_overrides": {"rope_theta": 1e4}}}},
        {"model": {"server_kwargs": {"hf_overrides": {"rope_theta": 1e4}}}},
    ],
)
def test_engine_and_ingress_read_the_model_alike(settings: dict[str, Any]) -> None:
    config = AppConfig.read(settings)
    replica = config.replica_config(config.replica_groups()[0])
    assert replica.engine_kwargs["hf_overrides"] == config.server_arguments["hf_overrides"] == {"rope_theta": 1e4}
    assert replica.max_model_len == config.server_arguments["max_model_len"] == 4096


def test_reasoning_reaches_the_engine_whose_grammars_begin_behind_it() -> None:
    config = AppConfig.read({"model": {"reasoning_parser": "qwen3"}})
    assert config.replica_config(config.replica_groups()[0]).engine_kwargs == {"reasoning_parser": "qwen3"}


@pytest.mark.parametrize(
    ("engine", "sizes"),
    [
        ({}, (64, 2048, 0.25, True, 4096)),
        ({"num_gpus": 1}, (0, 0, 0.0, False, 0)),
        ({"num_gpus": 1, "max_num_seqs": 9, "enforce_eager": True}, (9, 0, 0.0, True, 0)),
        ({"device": "timed"}, (256, 8192, 0.25, True, 4096)),
        ({"kind": "simulated", "num_gpus": 1}, (64, 2048, 0.25, True, 4096)),
    ],
)
def test_what_is_left_open_suits_the_device(engine: dict[str, Any], sizes: tuple[Any, ...]) -> None:
    config = AppConfig.read(H200 | {"engine": engine})
    made = config.replica_config(config.replica_groups()[0])
    own = (made.max_num_seqs, made.max_num_batched_tokens, made.kv_cache_gib, made.enforce_eager, made.max_model_len)
    assert own == sizes
    assert config.server_arguments["max_model_len"] == (sizes[-1] or None)


def test_a_group_on_gpus_has_their_defaults_though_the_others_have_not() -> None:
    config = AppConfig.read({"groups": [{"name": "cpu"}, {"name": "gpu", "engine": {"num_gpus": 1}}]})
    slow, fast = (config.replica_config(group) for group in config.replica_groups())
    assert (slow.max_num_seqs, fast.max_num_seqs) == (64, 0)
    assert slow.max_model_len == fast.max_model_len == 4096


def test_names_are_those_of_vllm() -> None:
    """A list of names that vLLM no longer has, or a new argument of its server, is noticed here."""
    vllm = pytest.importorskip("vllm")
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    of_engines = {field.name for field in dataclasses.fields(vllm.AsyncEngineArgs)}
    of_servers = {action.dest for action in make_arg_parser(FlexibleArgumentParser())._actions} - {"help"}
    assert of_engines >= SHARED
    moved = ONLY_SERVER | set(SERVES_OWN)
    assert of_servers - of_engines - HOMES.keys() <= moved
    assert moved - of_servers == set()
    assert HOMES.keys() <= of_servers | of_engines
    assert home_of("gpu_memory_utilization") == ("engine", "engine_kwargs", "gpu_memory_utilization")
