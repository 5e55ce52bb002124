"""The replica's settings at the ingress."""

import msgspec
import pytest

from replicas.config import replica_config


def test_defaults_make_an_embedded_vllm_replica() -> None:
    config = replica_config({})
    assert (config.engine, config.model, config.policy) == ("vllm", "embedded", "slo")
    assert config.profile_name == "embedded-cpu"


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"engine": "tensorrt"}, "engine"),
        ({"max_num_seqs": -1}, "max_num_seqs"),
        ({"hang_s": float("nan")}, "hang_s"),
        ({"kv_cache_gib": -1}, "kv_cache_gib"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, "max_num_batched_tokens"),
        ({"engine": "simulated"}, "profile"),
        ({"model": "some/model"}, "profile"),
        ({"profile": "abacus"}, "abacus"),
        ({"policy": "fifo"}, "policy"),
        ({"policy_options": {"budget": 1}}, "budget"),
        ({"policy_options": {"best_effort_share": 2}}, "best_effort_share"),
        ({"max_model_length": 5}, "max_model_length"),
        ({"max_model_len": "long"}, "max_model_len"),
    ],
)
def test_a_bad_value_names_its_key(settings: dict[str, object], field: str) -> None:
    with pytest.raises((ValueError, msgspec.ValidationError), match=field):
        replica_config(settings)


@pytest.mark.parametrize(
    ("engine_kwargs", "told"),
    [({}, 2), ({"async_scheduling": False}, 1), ({"pipeline_parallel_size": 2}, 1)],
)
def test_forecasts_are_told_how_many_iterations_follow_each_other(engine_kwargs: dict[str, object], told: int) -> None:
    """Those of a pipeline overlap: a newcomer enters it sooner than three of them take."""
    assert replica_config({"engine_kwargs": engine_kwargs}).told_depth == told
