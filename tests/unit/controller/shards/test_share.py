"""Shares of bounds: all parts together are the whole, and a part of nothing is nothing, not "no bound"."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from controller.scaling.allocation import Allocation, AllocationOptions
from controller.scaling.role import ReplicaView
from controller.scaling.signals import ScalingOptions
from controller.scaling.tiers import Tier, TierTable
from controller.shards.share import WHOLE, Share, split
from protocol.messages import INF
from routing.fleet_state import RESERVED, SHARED


@given(st.integers(0, 1000), st.integers(1, 20))
def test_parts_add_up_and_differ_by_one_at_most(total: int, parts: int) -> None:
    found = split(total, parts)
    assert (sum(found), len(found)) == (total, parts)
    assert max(found) - min(found) <= 1


def table(num_replicas: int = 0, min_replicas: int = 0, max_replicas: int = 0) -> TierTable:
    bounds = dict(num_replicas=num_replicas, min_replicas=min_replicas, max_replicas=max_replicas)
    return TierTable.of(3, [replace(Tier("tight", 0.3, 0.03), **bounds), Tier("flex", best_effort=True)])


def test_every_bound_of_a_tier_is_divided() -> None:
    shares = [Share(place, 3).of_table(table(min_replicas=2, max_replicas=7)).tiers[0] for place in range(3)]
    assert [tier.low for tier in shares] == [1, 1, 0]
    assert [tier.high for tier in shares] == [3, 2, 2]


def test_who_has_no_part_of_a_small_maximum_may_have_none_at_all() -> None:
    shares = [Share(place, 3).of_table(table(max_replicas=2)).tiers[0] for place in range(3)]
    assert [tier.high for tier in shares] == [1, 1, 0]
    own = [Share(place, 3).of_table(table(num_replicas=1)).tiers[0] for place in range(3)]
    assert [(tier.low, tier.high) for tier in own] == [(1, 1), (0, 0), (0, 0)]


@given(st.lists(st.integers(0, 1), min_size=1, max_size=3), st.lists(st.integers(1, 3), min_size=1, max_size=4))
def test_small_maximums_of_tiers_without_a_minimum_are_spread(lows: list[int], highs: list[int]) -> None:
    """Else one controller has all of those tiers, and the replicas of the others serve best effort alone."""
    tiers = [Tier(f"low{i}", 1.0, 0.01 * i, min_replicas=low, max_replicas=low) for i, low in enumerate(lows)]
    tiers += [Tier(f"high{i}", 1.0, 0.1 + 0.01 * i, max_replicas=high) for i, high in enumerate(highs)]
    shares = [Share(place, 4).of_table(TierTable.of(1, tiers)).tiers for place in range(4)]
    capped = [sum(tier.high for tier in share if tier.max_replicas) for share in shares]
    assert (sum(capped), max(capped) - min(capped) <= 1) == (sum(lows) + sum(highs), True)


def test_what_is_not_bounded_stays_so() -> None:
    assert Share(1, 3).of_table(table()).tiers[0].high == INF
    assert WHOLE.of_table(table(max_replicas=2)) == table(max_replicas=2)


def test_bounds_of_the_fleets_size_are_divided() -> None:
    whole = ScalingOptions(min_replicas=2, max_replicas=9, warm_spares=1, configured=4, target_utilization=0.5)
    shares = [Share(place, 4).of_scaling(whole) for place in range(4)]
    for name in ("min_replicas", "max_replicas", "warm_spares"):
        assert sum(getattr(share, name) for share in shares) == getattr(whole, name)
    assert {(share.target_utilization, share.configured) for share in shares if share} == {(0.5, 4)}
    assert Share(0, 4).of_scaling(None) is None


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), min_size=1, max_size=6), st.integers(2, 5))
def test_the_minimums_of_all_tiers_together_are_divided_as_evenly_as_the_replicas(
    bounds: list[tuple[int, int]], parts: int
) -> None:
    tiers = [
        Tier(f"t{i}", 1.0, 0.1 * i, min_replicas=low, max_replicas=low + more) for i, (low, more) in enumerate(bounds)
    ]
    lows = sum(low for low, _ in bounds)
    shares = [Share(place, parts).of_table(TierTable.of(1, tiers)).tiers for place in range(parts)]
    assert [sum(tier.low for tier in share) for share in shares] == split(lows, parts)
    for position, whole in enumerate(TierTable.of(1, tiers).tiers):
        own = [share[position] for share in shares]
        assert (sum(tier.low for tier in own), sum(tier.high for tier in own)) == (whole.low, whole.high)
        assert all(tier.low <= tier.high for tier in own)


def test_every_tier_has_its_replica_and_all_controllers_together_keep_to_the_maximum() -> None:
    tiers = [Tier(f"t{i}", 1.0, 0.1 * i, min_replicas=1) for i in range(3)]
    whole = TierTable.of(1, [*tiers, Tier("flex", best_effort=True)])
    served, most = set(), 0
    for place in range(2):
        options = AllocationOptions(scaling=ScalingOptions(min_replicas=1, max_replicas=4))
        allocation = Allocation(options, whole, share=Share(place, 2))
        allocation.step([ReplicaView(name, (0, 0, 0)) for name in "ab"], 0.0)
        served |= {allocation.tier(name) for name in "ab"}
        assert allocation.autoscaler is not None
        most += allocation.autoscaler._high
    assert served >= {0, 1, 2}
    assert most == 4


@pytest.mark.parametrize(("bounds", "is_dynamic"), [({"min_replicas": 1}, True), ({"num_replicas": 1}, False)])
@pytest.mark.parametrize("place", [0, 1])
def test_roles_are_moved_in_all_shards_or_in_none(bounds: dict[str, int], is_dynamic: bool, place: int) -> None:
    """The shard without a part of a minimum served all tiers on each replica; one without a part of an exact number
    moved roles."""
    allocation = Allocation(AllocationOptions(), table(**bounds), share=Share(place, 2))
    assert allocation.is_dynamic == is_dynamic
    allocation = Allocation(AllocationOptions(), table(**bounds))
    allocation.set_share(Share(place, 2), 1.0)
    assert allocation.is_dynamic == is_dynamic
    allocation.step([ReplicaView(name, (0,)) for name in "ab"], 2.0)
    tiers = sorted(allocation.tier(name) for name in "ab")
    others = RESERVED if is_dynamic else SHARED
    assert tiers == (sorted([0, others]) if place == 0 else [others, others])


def views(names: str) -> list[ReplicaView]:
    return [ReplicaView(name, (0,)) for name in names]


def test_a_share_stays_when_the_table_changes_and_its_roles_follow() -> None:
    allocation = Allocation(AllocationOptions("dynamic"), table(min_replicas=4))
    allocation.step(views("abcd"), 0.0)
    assert [allocation.tier(name) for name in "abcd"] == [0, 0, 0, 0]
    assert allocation.set_share(Share(0, 2), 1.0)
    assert not allocation.set_share(Share(0, 2), 1.0), "the same one"
    assert allocation.table.tiers[0].low == 2
    allocation.set_table(
        TierTable.of(4, [Tier("tight", 0.3, 0.03, min_replicas=6), Tier("flex", best_effort=True)]), 2.0
    )
    assert allocation.table.tiers[0].low == 3, "its part of the new bound"
    allocation.set_share(WHOLE, 3.0)
    assert allocation.table.tiers[0].low == 6


def test_an_autoscaler_keeps_to_the_share() -> None:
    options = AllocationOptions(scaling=ScalingOptions(min_replicas=2, max_replicas=8))
    allocation = Allocation(options, table())
    assert allocation.autoscaler is not None
    allocation.autoscaler.target = 3
    allocation.set_share(Share(1, 2), 1.0)
    assert (allocation.autoscaler.options.min_replicas, allocation.autoscaler.options.max_replicas) == (1, 4)
    assert allocation.autoscaler.target == 3, "what it was doing goes on"
