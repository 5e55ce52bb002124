"""Roles and autoscaling in the configuration: what is accepted, and what becomes of it."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from controller.scaling.allocation import AllocationOptions
from controller.scaling.signals import ScalingOptions
from serving.config.app import IMPORT_PATH, AppConfig
from serving.config.base import ConfigError
from serving.config.model_tables import tables_of
from serving.launch.launch import check_document
from tests.support.serve_files import read_serve_file

SIDES = [{"name": "p", "phase": "prefill", "num_replicas": 2}, {"name": "d", "phase": "decode", "num_replicas": 2}]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"fleet": {"autoscaling": {"max_replica": 4}}}, "fleet.autoscaling.max_replica: unknown key; did you mean"),
        ({"fleet": {"autoscaling": {"min_replicas": 3, "max_replicas": 2}}}, "fleet.autoscaling.max_replicas: must be"),
        ({"fleet": {"autoscaling": {"warm_spares": 2}}}, "fleet.autoscaling.warm_spares: has no effect without max"),
        ({"fleet": {"autoscaling": {"max_replicas": 4, "group": "a"}}}, "fleet.autoscaling.group: no group 'a'"),
        ({"fleet": {"autoscaling": {"max_replicas": 1}}}, "fleet.autoscaling: 2 replicas to begin with are"),
        (
            {"fleet": {"routing": "silos", "autoscaling": {"max_replicas": 4}}},
            "fleet.routing: silos have a fixed size, because replicas that come would belong to no tier",
        ),
        (
            {"fleet": {"routing": "silos", "roles": "static", "autoscaling": {"max_replicas": 4}}},
            "fleet.routing: silos have a fixed size",
        ),
    ],
)
def test_mistake_names_the_field(settings: Any, told: str) -> None:
    with pytest.raises(ConfigError) as error:
        AppConfig.read(settings)
    assert str(error.value).startswith(told)


def test_replicas_that_all_tiers_share_may_follow_the_load() -> None:
    config = AppConfig.read({"fleet": {"roles": "static", "autoscaling": {"max_replicas": 4}}})
    allocation = config.fleet_options("app").allocation
    assert allocation.roles == "static"
    assert allocation.scaling is not None


def test_fleet_options_carry_roles_and_scaling() -> None:
    fixed = AppConfig.read({}).fleet_options("app")
    assert fixed.allocation == AllocationOptions()
    assert (fixed.application, fixed.deployments) == ("app", ("Replica",))
    groups = [{"name": "a", "num_replicas": 2}, {"name": "b"}]
    fleet = {"role_idle_s": 9.0, "autoscaling": {"max_replicas": 5, "group": "b", "warm_spares": 1}}
    config = AppConfig.read({"groups": groups, "fleet": fleet})
    assert config.most_replicas == 5
    options = config.fleet_options()
    assert options.deployments == ("Replica-b", "Replica-a"), "the one that grows and shrinks first"
    assert options.allocation.idle_s == 9.0
    assert options.allocation.scaling == ScalingOptions(max_replicas=5, group="b", warm_spares=1, configured=3)


def test_a_disaggregated_fleet_may_follow_the_load() -> None:
    """Replicas that no group binds take both phases, others the one that they are bound to."""
    scaled = {"autoscaling": {"max_replicas": 5}}
    free = AppConfig.read({"disaggregation": {"prefill": 1}, "fleet": scaled}).fleet_options().allocation.scaling
    assert free is not None
    assert free.phases == ("prefill", "decode")
    groups = [{"name": "p", "phase": "prefill"}, {"name": "d", "phase": "decode"}]
    bound = AppConfig.read({"groups": groups, "fleet": {"autoscaling": {"max_replicas": 5, "group": "d"}}})
    scaling = bound.fleet_options().allocation.scaling
    assert scaling is not None
    assert (scaling.group, scaling.phases) == ("d", ("decode",))


def test_defaults_of_scaling_are_the_controllers() -> None:
    scaling = AppConfig.read({"fleet": {"autoscaling": {"max_replicas": 3}}}).fleet.autoscaling
    assert scaling.options("", 2, "best_effort") == ScalingOptions(max_replicas=3, configured=2)


def test_the_autoscaler_knows_what_becomes_of_what_the_fleet_cannot_attain() -> None:
    read = AppConfig.read({"fleet": {"autoscaling": {"max_replicas": 3}, "unattainable": "refuse"}})
    scaling = read.fleet_options().allocation.scaling
    assert scaling is not None
    assert scaling.unattainable == "refuse"


def test_a_fleet_that_scales_needs_serves_external_scaler(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    app = {"import_path": IMPORT_PATH, "args": {"fleet": {"autoscaling": {"max_replicas": 3}}}}
    path.write_text(yaml.safe_dump({"applications": [app]}))
    with pytest.raises(ConfigError, match=r"args\.fleet\.autoscaling: needs external_scaler_enabled: true"):
        read_serve_file(path)
    path.write_text(yaml.safe_dump({"applications": [{**app, "external_scaler_enabled": True}]}))
    assert read_serve_file(path)[0].most_replicas == 3


def test_a_table_that_scales_a_fleet_needs_it_too() -> None:
    tiers = [{"name": "chat", "ttft_ms": 500, "tpot_ms": 50}, {"name": "batch", "best_effort": True}]
    table = {"version": 1, "default_tier": "chat", "tiers": tiers, "fleet": {"autoscaling": {"max_replicas": 3}}}
    app = {"import_path": IMPORT_PATH, "deployments": [{"name": "Ingress", "user_config": table}]}
    told = r"serve\.yaml: deployments\.Ingress\.user_config\.fleet\.autoscaling: needs external_scaler_enabled: true"
    with pytest.raises(ConfigError, match=told):
        check_document({"applications": [app]}, "serve.yaml")
    check_document({"applications": [{**app, "external_scaler_enabled": True}]}, "serve.yaml")


@pytest.mark.parametrize("bound", ["min_replicas", "max_replicas"])
@pytest.mark.parametrize("stated_in", ["args", "user_config"])
def test_a_tier_of_silos_has_a_number_of_replicas_and_no_bounds(bound: str, stated_in: str) -> None:
    routing = {"routing": "silos"}
    args = AppConfig.read({"fleet": routing if stated_in == "args" else {}})
    tiers = [{"name": "chat", "ttft_ms": 900, bound: 1}, {"name": "rest", "best_effort": True}]
    table = {"version": 1, "default_tier": "chat", "tiers": tiers, "fleet": routing if stated_in != "args" else {}}
    with pytest.raises(ConfigError, match=rf"^tiers\.0\.{bound}: replicas of silos do not move"):
        tables_of(table, args)
    tiers[0] = {"name": "chat", "ttft_ms": 900, "num_replicas": 1}
    assert tables_of(table, args)


@pytest.mark.parametrize(
    ("own", "args", "is_wrong"),
    [
        ({"std": 2}, {}, True),
        ({"rest": 2}, {}, True),
        ({"std": 1}, {}, False),
        ({"gold": 1, "std": 1}, {}, False),
        (
            {"std": 1},
            {"disaggregation": {"prefill": 1}, "engine": {"kind": "simulated"}, "profile": "h200_sxm__llama-3.1-8b"},
            True,
        ),
        ({"std": 2}, {"fleet": {"autoscaling": {"max_replicas": 3}}}, False),
        ({"std": 2}, {"groups": SIDES, "engine": {"kind": "simulated"}, "profile": "h200_sxm__llama-3.1-8b"}, True),
        ({"std": 1}, {"groups": SIDES, "engine": {"kind": "simulated"}, "profile": "h200_sxm__llama-3.1-8b"}, False),
    ],
)
def test_a_tier_to_which_no_replica_is_left_is_an_error(
    own: dict[str, int], args: dict[str, Any], is_wrong: bool
) -> None:
    """Static roles never give a tier what a looser one has to itself: on an idle fleet all of it was best effort."""
    tiers: list[dict[str, Any]] = [
        {"name": "gold", "ttft_ms": 300, "tpot_ms": 20},
        {"name": "std", "ttft_ms": 500, "tpot_ms": 50},
        {"name": "rest", "best_effort": True},
    ]
    for tier in tiers:
        tier |= {"num_replicas": own[tier["name"]]} if tier["name"] in own else {}
    table = {"version": 1, "default_tier": "std", "tiers": tiers}
    if not is_wrong:
        assert tables_of(table, AppConfig.read(args))
        return
    with pytest.raises(ConfigError, match=r"^tiers\.0\.num_replicas: other tiers have all . replicas to themselves"):
        tables_of(table, AppConfig.read(args))
