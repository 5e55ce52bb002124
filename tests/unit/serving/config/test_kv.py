"""``kv_transfer_config`` against the form of the fleet, and before anything starts."""

from typing import Any

import pytest

from serving.config.app import AppConfig
from serving.config.base import ConfigError
from serving.config.vllm_check import check

H200 = "h200_sxm__llama-3.1-8b"
NIXL = {"kv_connector": "NixlConnector"}
APART = [{"name": "p", "phase": "prefill"}, {"name": "d", "phase": "decode"}]


def with_transfer(transfer: Any, **more: Any) -> dict[str, Any]:
    return {"engine": {"engine_kwargs": {"kv_transfer_config": transfer}}, **more}


def replicas(settings: dict[str, Any]) -> list[Any]:
    config = AppConfig.read(settings)
    return [config.replica_config(group) for group in config.replica_groups()]


def test_a_whole_fleet_stores_and_loads() -> None:
    options = {"lmcache.mp.port": 5556}
    stated = {"kv_connector": "LMCacheMPConnector", "kv_connector_extra_config": options, "kv_port": 14580}
    (only,) = replicas(with_transfer(stated))
    assert (only.kv_connector, only.kv_role, only.kv_connector_extra_config) == (
        "LMCacheMPConnector",
        "kv_both",
        options,
    )
    assert only.kv_transfer_config == {"kv_port": 14580}
    assert only.engine_kwargs == {}


def test_roles_follow_the_phases_of_the_groups() -> None:
    apart = replicas(with_transfer(NIXL, groups=APART))
    assert [each.kv_role for each in apart] == ["kv_producer", "kv_consumer"]
    assert {each.kv_connector for each in apart} == {"NixlConnector"}
    by_section = replicas({"groups": APART, "disaggregation": {"kv_connector": "NixlConnector"}})
    assert [each.kv_role for each in by_section] == ["kv_producer", "kv_consumer"]
    moving = replicas({"disaggregation": {"prefill": 1, "kv_connector": "NixlConnector"}})
    assert [each.kv_role for each in moving] == ["kv_both"], "a replica that changes phase does both"
    assert [each.kv_role for each in replicas({"groups": APART})] == ["kv_both"] * 2, "files have no roles"


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (with_transfer({"kv_role": "kv_both"}), "engine.engine_kwargs.kv_transfer_config.kv_connector: is required"),
        (
            with_transfer(NIXL | {"kv_connector_extra_config": 5}),
            "engine.engine_kwargs.kv_transfer_config.kv_connector_extra_config: must be an object",
        ),
        (with_transfer("nixl"), "engine.engine_kwargs.kv_transfer_config: must be an object"),
        (
            with_transfer(NIXL | {"kv_role": "kv_producer"}),
            "engine.engine_kwargs.kv_transfer_config.kv_role: 'kv_producer' is for a fleet that prefills and decodes",
        ),
        (
            with_transfer(NIXL | {"kv_role": "kv_consumer"}, groups=APART),
            "engine.engine_kwargs.kv_transfer_config.kv_role: 'kv_consumer', but a replica bound to phase 'prefill'",
        ),
        (
            with_transfer(NIXL, groups=APART, disaggregation={"kv_connector": "MooncakeConnector"}),
            "disaggregation.kv_connector: engine.engine_kwargs.kv_transfer_config says 'NixlConnector'",
        ),
        (
            {"engine": {"engine_kwargs": {"kv_offloading_size": 1.0}}, "disaggregation": {"prefill": 1}},
            "engine.engine_kwargs.kv_offloading_size: moves KV caches too; set disaggregation.kv_connector alone",
        ),
        (
            {"engine": {"kind": "simulated", "engine_kwargs": {"kv_transfer_config": NIXL}}, "profile": H200},
            "engine.engine_kwargs.kv_transfer_config: a simulated engine has no KV cache to hand over",
        ),
    ],
)
def test_what_does_not_suit_the_fleet_is_named(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as error:
        AppConfig.read(settings)
    assert str(error.value).startswith(told)


def test_groups_of_a_disaggregated_fleet_share_a_connector() -> None:
    groups = [APART[0], APART[1] | {"engine": {"engine_kwargs": {"kv_transfer_config": NIXL}}}]
    with pytest.raises(ConfigError, match="all groups need the same connector, got NixlConnector, files"):
        AppConfig.read({"groups": groups})


@pytest.mark.parametrize(
    ("transfer", "told"),
    [
        (
            {"kv_connector": "NixlConector"},
            "engine.engine_kwargs.kv_transfer_config.kv_connector: vLLM has no connector 'NixlConector'; did you mean",
        ),
        (
            {"kv_connector": "MooncakeConnector"},
            "engine.engine_kwargs.kv_transfer_config.kv_connector: MooncakeConnector needs the package moon",
        ),
        (
            {"kv_connector": "ExampleConnector", "kv_prt": 1},
            "engine.engine_kwargs.kv_transfer_config: ",
        ),
    ],
)
def test_what_vllm_or_the_machine_lacks_is_named_before_ray_starts(
    transfer: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replicas.kv_transfer.find_spec", lambda name: None)
    with pytest.raises(ConfigError) as error:
        check(AppConfig.read(with_transfer(transfer)))
    assert str(error.value).startswith(told)
    check(AppConfig.read(with_transfer({"kv_connector": "ExampleConnector"})))


def test_a_connector_of_the_section_is_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replicas.kv_transfer.find_spec", lambda name: None)
    config = AppConfig.read({"disaggregation": {"prefill": 1, "kv_connector": "NixlConnector"}})
    assert config.has_vllm_arguments
    with pytest.raises(ConfigError, match=r"^disaggregation.kv_connector: NixlConnector needs the package nixl"):
        check(config)
