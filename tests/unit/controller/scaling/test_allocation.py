"""Which roles are in force: what the configuration and the tier table together say."""

import pytest

from controller.scaling.allocation import Allocation, AllocationOptions
from controller.scaling.signals import ScalingOptions
from controller.scaling.tiers import Tier, TierTable

PLAIN = TierTable.of(1, [Tier("tight", 1.0, 0.02), Tier("loose", 1.0, 0.1)])
BOUNDED = TierTable.of(2, [Tier("tight", 1.0, 0.02, min_replicas=1), Tier("loose", 1.0, 0.1)])


@pytest.mark.parametrize("scaling", [None, ScalingOptions(max_replicas=4)])
def test_a_bound_turns_roles_on_in_place_and_its_end_turns_them_off(scaling: ScalingOptions | None) -> None:
    allocation = Allocation(AllocationOptions(scaling=scaling), PLAIN)
    for table, is_dynamic in ((PLAIN, False), (BOUNDED, True), (PLAIN, False)):
        allocation.set_table(table, 0.0)
        assert allocation.is_dynamic == is_dynamic
        assert allocation.autoscaler is None or allocation.autoscaler.roles is allocation.roles


@pytest.mark.parametrize("roles", ["static", "dynamic"])
def test_roles_that_are_stated_stay(roles: str) -> None:
    for table in (PLAIN, BOUNDED):
        assert Allocation(AllocationOptions(roles), table).is_dynamic == (roles == "dynamic")
