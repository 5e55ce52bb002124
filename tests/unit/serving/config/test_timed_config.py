"""A timed device in the configuration."""

from typing import Any

import pytest

from serving.config.app import AppConfig
from serving.config.base import ConfigError

H200 = "h200_sxm__llama-3.1-8b"
TIMED = {"device": "timed"}


def test_a_timed_device_is_what_the_replicas_are_told() -> None:
    engine = TIMED | {"timed": {"steps_in_flight": 3, "spread": 0.1, "acceptance": 0.5}, "speed": 2.0}
    config = AppConfig.read({"engine": engine, "profile": H200})
    replica = config.replica_config(config.replica_groups()[0])
    assert (replica.engine, replica.device, replica.profile, replica.speed) == ("vllm", "timed", H200, 2.0)
    assert (replica.depth, replica.iteration_spread, replica.draft_acceptance) == (3, 0.1, 0.5)


def test_devices_may_differ_by_group() -> None:
    groups = [{"name": "real"}, {"name": "modelled", "engine": TIMED, "profile": H200}]
    config = AppConfig.read({"groups": groups})
    assert [config.replica_config(group).is_timed for group in config.replica_groups()] == [False, True]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engine": TIMED}, "profile: is needed for a timed device"),
        ({"engine": TIMED | {"kind": "simulated"}, "profile": H200}, "engine.device: timed is a device of kind vllm"),
        ({"engine": {"timed": {"spread": 0.1}}}, "engine.timed: has no effect without device: timed"),
        ({"engine": TIMED | {"timed": {"steps_in_flight": 4}}, "profile": H200}, "engine.timed.steps_in_flight"),
        ({"engine": {"speed": 2.0}}, "engine.speed: must be 1 for a real engine"),
        ({"engine": {"kv_capacity_tokens": 500}}, "engine.kv_capacity_tokens: must be 0 for a real engine"),
        ({"engine": TIMED, "profile": H200, "disaggregation": {"prefill": 1}}, "disaggregation: a timed device"),
    ],
)
def test_what_a_timed_device_cannot_be(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        AppConfig.read(settings).replica_groups()
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("engine", "without"),
    [
        ("simulated", {"logprobs", "prompt_logprobs"}),
        (TIMED, {"logprobs", "prompt_logprobs", "structured_outputs"}),
    ],
)
def test_what_needs_logits_is_known_beforehand(engine: Any, without: set[str]) -> None:
    assert AppConfig.read({"engine": engine, "profile": H200}).not_computed == without
    assert not AppConfig.read({}).not_computed
