"""Settings of the fleet that change while it runs."""

from typing import Any

import pytest

from controller.options import FleetOptions
from serving.config.app import AppConfig
from serving.config.base import ConfigError
from serving.config.live import LIVE, in_force

ARGS: dict[str, Any] = {
    "model": "embedded",
    "engine": {"kind": "simulated", "max_num_seqs": 16},
    "profile": "h200_sxm__llama-3.1-8b",
    "fleet": {"num_replicas": 3, "max_hops": 3, "autoscaling": {"max_replicas": 5, "upscale_delay_s": 2.0}},
}


def test_what_is_stated_is_over_args_and_the_rest_stays() -> None:
    before = AppConfig.read(ARGS)
    after = in_force(before, {"routing": "round_robin", "autoscaling": {"max_replicas": 8}})
    assert (after.fleet.routing, after.fleet.max_hops, after.most_replicas) == ("round_robin", 3, 8)
    assert after.fleet.autoscaling.upscale_delay_s == 2.0
    assert after.model_copy(update={"fleet": before.fleet}) == before
    assert in_force(before, {}) is before


@pytest.mark.parametrize("bounds", [{"max_replicas": 2}, {"min_replicas": 4}, {"min_replicas": 4, "max_replicas": 4}])
def test_bounds_of_a_fleet_that_runs_need_not_include_what_it_began_with(bounds: dict[str, int]) -> None:
    """A fleet of three could not be capped at two while it ran."""
    scaling = in_force(AppConfig.read(ARGS), {"autoscaling": bounds}).fleet_options().allocation.scaling
    assert scaling is not None
    assert {name: getattr(scaling, name) for name in bounds} == bounds
    assert (scaling.configured, scaling.upscale_delay_s) == (3, 2.0)
    with pytest.raises(ConfigError, match="3 replicas to begin with are outside of"):
        AppConfig.read({**ARGS, "fleet": {"num_replicas": 3, "autoscaling": {"max_replicas": 9} | bounds}})


def test_autoscaling_can_be_switched_off_while_the_fleet_runs() -> None:
    off = in_force(AppConfig.read(ARGS), {"autoscaling": {"max_replicas": 0}})
    assert off.fleet_options().allocation.scaling is None
    with pytest.raises(ConfigError, match="upscale_delay_s: has no effect without max_replicas"):
        AppConfig.read({"fleet": {"autoscaling": {"upscale_delay_s": 2.0}}})
    with pytest.raises(ConfigError, match="upscale_delay_s: has no effect without max_replicas"):
        in_force(AppConfig.read({}), {"autoscaling": {"upscale_delay_s": 2.0}})


def test_every_live_setting_is_one_of_the_controllers() -> None:
    assert set(FleetOptions.__struct_fields__) | {"roles", "role_idle_s", "autoscaling"} >= LIVE


@pytest.mark.parametrize(
    ("stated", "told"),
    [
        ({"num_replicas": 4}, "fleet.num_replicas: cannot change while the fleet runs; state it in args"),
        ({"max_hop": 4}, "fleet.max_hop: unknown key; did you mean 'max_hops'?"),
        ({"routing": "best"}, "fleet.routing: no policy 'best'"),
        (
            {"autoscaling": {"max_replicas": 2, "min_replicas": 3}},
            "fleet.autoscaling.max_replicas: must be at least min",
        ),
        ({"autoscaling": {"most": 2}}, "fleet.autoscaling.most: unknown key"),
        ({"autoscaling": {"max_replicas": 2, "min_replicas": -1}}, "fleet.autoscaling.min_replicas: "),
        ({"autoscaling": 3}, "fleet.autoscaling: must hold keys and values"),
        ({"max_hops": "2"}, "fleet.max_hops: "),
    ],
)
def test_what_makes_no_sense_is_named(stated: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as error:
        in_force(AppConfig.read(ARGS), stated)
    assert str(error.value).startswith(told)
