"""A tier with replicas to itself, whose requests also go to those that serve all."""

from controller.scaling.signals import ScalingOptions
from controller.scaling.tiers import Tier, TierTable
from tests.support.scaling_cases import World

OWN = Tier("tight", 0.3, 0.02, num_replicas=1)


def size(own: Tier, rate_per_s: float) -> int:
    tiers = TierTable.of(1, [own, Tier("loose", 3.0, 0.1), Tier("flex", best_effort=True)])
    options = ScalingOptions(min_replicas=1, max_replicas=10)
    world = World(options, tiers, rates={"tight": rate_per_s, "loose": 2.0}, is_shared=True)
    world.run(300)
    return world.wanted


def test_those_that_serve_all_follow_what_its_own_ones_cannot_take() -> None:
    """Its demand counted as its own replicas, however much more it was: the fleet stayed as it was."""
    assert size(OWN, 60.0) >= size(Tier("tight", 0.3, 0.02), 60.0) > 2


def test_what_its_own_ones_can_take_asks_for_no_more() -> None:
    assert size(OWN, 1.0) == 2
