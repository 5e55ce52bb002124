"""The tier table and its static assignment."""

import pytest

from controller.scaling.tiers import Tier, TierTable
from protocol.messages import INF, Slo
from routing.fleet_state import SHARED


def table() -> TierTable:
    return TierTable.of(
        1,
        [
            Tier("batch", best_effort=True),
            Tier("loose", 2.0, 0.1, num_replicas=1),
            Tier("tight", 0.3, 0.02, num_replicas=2),
        ],
    )


def test_tiers_are_ordered_from_tight_to_best_effort() -> None:
    assert [tier.name for tier in table().tiers] == ["tight", "loose", "batch"]
    assert table().find("loose") == 1
    assert table().pool == 2


def test_a_request_whose_tier_was_removed_belongs_to_the_next_tighter_one() -> None:
    def asked(tier: str, tpot_s: float, best_effort: bool = False) -> int:
        return table().of_request(Slo(tpot_s=tpot_s, tier=tier, best_effort=best_effort))

    assert asked("loose", 0.01) == 1, "by its name"
    assert asked("gone", 0.5) == 1
    assert asked("gone", 0.05) == 0
    assert asked("gone", 0.01) == 0, "all are looser: the tightest"
    assert asked("gone", INF, best_effort=True) == 2


def test_nearest_tiers_in_another_table() -> None:
    other = TierTable.of(2, [Tier("batch", best_effort=True), Tier("tight", 0.3, 0.02), Tier("new", 0.5, 0.05)])
    assert table().tier_remap(other).tolist() == [0, 1, 2, -1]
    assert other.tier_remap(table()).tolist() == [0, 0, 2, -1]


def test_bounds_of_a_tier() -> None:
    assert (Tier("a").low, Tier("a").high) == (0, float("inf"))
    assert (Tier("a", num_replicas=2).low, Tier("a", num_replicas=2).high) == (2, 2)
    assert (Tier("a", min_replicas=1, max_replicas=3).low, Tier("a", min_replicas=1, max_replicas=3).high) == (1, 3)
    assert not table().asks_for_roles
    assert TierTable.of(1, [Tier("a", max_replicas=3)]).asks_for_roles


def test_assignment_serves_the_tightest_first_and_shares_the_rest() -> None:
    assert table().assign(["d", "c", "b", "a"]) == {"a": 0, "b": 0, "c": 1, "d": SHARED}
    assert table().assign(["a"]) == {"a": 0}


def test_names_differ() -> None:
    with pytest.raises(ValueError, match="must differ"):
        TierTable.of(1, [Tier("a"), Tier("a")])
