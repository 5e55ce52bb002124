"""vLLM's arguments that would break the plug-in, or mean nothing over a fleet, are refused before anything starts."""

from typing import Any

import pytest

from serving.config.app import AppConfig
from serving.config.base import ConfigError


def mistake(settings: Any) -> str:
    with pytest.raises(ConfigError) as error:
        AppConfig.read(settings)
    return str(error.value)


@pytest.mark.parametrize(
    "engine_kwargs",
    [
        {"scheduler_cls": "a.Scheduler"},
        {"additional_config": {"a": 1}},
        {"distributed_executor_backend": "ray"},
        {"worker_cls": "a.Worker"},
        {"pipeline_parallel_size": 2},
        {"decode_context_parallel_size": 2},
        {"data_parallel_size": 2},
        {"data_parallel_size_local": 2},
        {"data_parallel_rank": 0},
        {"data_parallel_external_lb": True},
        {"data_parallel_backend": "ray"},
        {"enable_elastic_ep": True},
        {"nnodes": 2},
        {"model": "a/b"},
        {"served_model_name": "a"},
        {"enable_prefix_caching": True},
        {"kv_cache_memory_bytes": 1 << 30},
        {"max_num_scheduled_tokens": 64},
        {"scheduling_policy": "priority"},
        {"runner": "pooling"},
        {"data-parallel-size": 2},
        {"--tensor-parallel-size": 2},
        {"_api_process_count": 2},
    ],
)
def test_argument_that_breaks_the_plug_in_is_refused(engine_kwargs: dict[str, Any]) -> None:
    (name,) = engine_kwargs
    assert mistake({"engine": {"engine_kwargs": engine_kwargs}}).startswith(f"engine.engine_kwargs.{name}: ")
    in_a_group = mistake({"groups": [{"name": "a", "engine": {"engine_kwargs": engine_kwargs}}]})
    assert in_a_group.startswith(f"groups.0.engine.engine_kwargs.{name}: ")


@pytest.mark.parametrize(
    "engine_kwargs",
    [
        {"tensor_parallel_size": 2},
        {"data_parallel_size": 1, "pipeline_parallel_size": 1, "nnodes": 1},
        {"scheduler_cls": None, "data_parallel_external_lb": False},
        {"async_scheduling": False, "disable_log_stats": True},
        {"speculative_config": {"method": "eagle", "model": "a/b", "num_speculative_tokens": 3}},
    ],
)
def test_other_arguments_reach_vllm(engine_kwargs: dict[str, Any]) -> None:
    config = AppConfig.read({"engine": {"engine_kwargs": engine_kwargs}})
    assert config.replica_config(config.replica_groups()[0]).engine_kwargs == engine_kwargs


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"engine": {"engine_kwargs": {"swap_spice": 1}}}, "engine.engine_kwargs.swap_spice: unknown key"),
        (
            {"engine": {"engine_kwargs": {"tensor_parallel_sise": 2}}},
            "engine.engine_kwargs.tensor_parallel_sise: unknown key; did you mean 'tensor_parallel_size'?",
        ),
        (
            {"groups": [{"name": "a"}, {"name": "b", "engine": {"engine_kwargs": {"xxxxxxxx": 1}}}]},
            "groups.1.engine.engine_kwargs.xxxxxxxx: unknown key; vLLM has no such argument",
        ),
    ],
)
def test_an_argument_that_vllm_does_not_have_is_named_before_an_engine_starts(settings: Any, told: str) -> None:
    """It was a TypeError in every replica."""
    pytest.importorskip("ray")
    pytest.importorskip("vllm")
    from replicas.vllm_settings import engine_config
    from serving.app import check_arguments

    config = AppConfig.read(settings)
    with pytest.raises(ConfigError) as error:
        check_arguments(config)
    assert str(error.value).startswith(told)
    with pytest.raises(ValueError, match=r"^engine_kwargs"):  # where a replica is made without Serve
        engine_config(config.replica_config(config.replica_groups()[-1]), "link")


def test_arguments_that_vllm_has_pass() -> None:
    pytest.importorskip("ray")
    pytest.importorskip("vllm")
    from serving.app import check_arguments

    config = AppConfig.read({"engine": {"engine_kwargs": {"tensor_parallel_size": 2, "seed": 1}}})
    check_arguments(config)
    wrong = AppConfig.read({"engine": {"engine_kwargs": {"tensor_parallel_size": 2, "sead": 1}}})
    with pytest.raises(ConfigError):  # so the check did look at them
        check_arguments(wrong)


def test_as_many_gpus_as_tensor_parallelism_needs() -> None:
    two = {"engine_kwargs": {"tensor_parallel_size": 2}}
    told = "engine.num_gpus: tensor_parallel_size 2 x pipeline_parallel_size 1 needs 2 GPUs, got 1"
    assert mistake({"engine": {"num_gpus": 1, **two}}) == told
    assert AppConfig.read({"engine": {"num_gpus": 2, **two}}).gpus_needed == 4
    assert AppConfig.read({"engine": two}).gpus_needed == 0  # processes of a CPU


def test_vllms_own_order_takes_its_own_arguments() -> None:
    engine_kwargs = {"scheduling_policy": "priority", "enable_chunked_prefill": True}
    assert (
        AppConfig.read({"engine": {"scheduler": "vllm", "engine_kwargs": engine_kwargs}}).engine.engine_kwargs
        == engine_kwargs
    )


def test_argument_that_contradicts_a_section_is_refused() -> None:
    twice = {"speculation": {"num_speculative_tokens": 2}, "engine_kwargs": {"speculative_config": {"method": "ngram"}}}
    assert mistake({"engine": twice}).startswith(
        "engine.engine_kwargs.speculative_config: set engine.speculation.num_speculative_tokens"
    )


@pytest.mark.parametrize("keys", [12345, ["a", 12345], 0, [None]])
def test_an_api_key_that_is_no_text_is_refused_and_not_shown(keys: Any) -> None:
    told = "model.server_kwargs.api_key: each key must be text; put it in quotes"
    assert mistake({"model": {"server_kwargs": {"api_key": keys}}}) == told
    assert mistake({"engine_kwargs": {"api_key": keys}}) == told


@pytest.mark.parametrize("keys", ["12345", ["a", "12345"], None])
def test_api_keys_that_are_text_are_taken(keys: str | list[str] | None) -> None:
    config = AppConfig.read({"engine_kwargs": {"api_key": keys}})
    assert config.model.api_keys == ([keys] if isinstance(keys, str) else keys or [])
    assert config.guard.asks_environment == (keys is None)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("max-model-len", "set model.max_model_len instead"),
        ("served_model_name", "set model.served_model_name instead"),
        ("--model", "set model.id instead"),
        ("max_num_seqs", "set engine.max_num_seqs instead"),
        ("tensor_parallel_size", "concerns engines; set engine.engine_kwargs.tensor_parallel_size instead"),
        ("data-parallel-size", "replicas are the data parallelism here; raise fleet.num_replicas"),
        ("scheduler_cls", "is how this project's scheduler"),
        ("distributed-executor-backend", "a replica brings its own executor"),
        ("port", "has no effect, because Ray Serve listens"),
        ("headless", "has no effect, because Ray Serve listens"),
        ("api_server_count", "has no effect, because Ray Serve listens"),
        ("enable_prompt_embeds", "admission counts tokens"),
    ],
)
def test_argument_that_means_nothing_to_the_ingress_is_refused(name: str, told: str) -> None:
    said = mistake({"model": {"server_kwargs": {name: 2}}})
    assert said.startswith(f"model.server_kwargs.{name}: {told}")


@pytest.mark.parametrize("origins", ["https://user:pass@a", "*", 5, '{"a": 1}'])
def test_origins_that_are_no_list_are_refused(origins: Any) -> None:
    told = "model.server_kwargs.allowed_origins: must be a list; put it in brackets"
    assert mistake({"model": {"server_kwargs": {"allowed_origins": origins}}}) == told


@pytest.mark.parametrize("origins", [["https://a"], '["https://a"]'])
def test_origins_may_be_a_list_or_vllms_own_json(origins: Any) -> None:
    config = AppConfig.read({"model": {"server_kwargs": {"allowed_origins": origins}}})
    assert config.guard.cors["allow_origins"] == ["https://a"]
