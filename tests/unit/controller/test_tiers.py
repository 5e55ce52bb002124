"""The tier table and its static assignment."""

import pytest

from controller.tiers import Tier, TierTable
from routing.mirrors import SHARED


def table() -> TierTable:
    return TierTable.of(
        1, [Tier("batch", best_effort=True), Tier("loose", 2.0, 0.1, replicas=1), Tier("tight", 0.3, 0.02, replicas=2)]
    )


def test_tiers_are_ordered_from_tight_to_best_effort() -> None:
    assert [tier.name for tier in table().tiers] == ["tight", "loose", "batch"]
    assert table().index("loose") == 1
    assert table().pool == 2


def test_a_request_whose_tier_was_removed_belongs_to_the_next_tighter_one() -> None:
    assert table().index("gone", 0.5) == 1
    assert table().index("gone", 0.05) == 0
    assert table().index("gone", 0.01) == 0, "all are looser: the tightest"
    assert table().index("gone", best_effort=True) == 2


def test_bounds_of_a_tier() -> None:
    assert (Tier("a").low, Tier("a").high) == (0, float("inf"))
    assert (Tier("a", replicas=2).low, Tier("a", replicas=2).high) == (2, 2)
    assert (Tier("a", min_replicas=1, max_replicas=3).low, Tier("a", min_replicas=1, max_replicas=3).high) == (1, 3)
    assert not table().asks_for_roles
    assert TierTable.of(1, [Tier("a", max_replicas=3)]).asks_for_roles


def test_assignment_serves_the_tightest_first_and_shares_the_rest() -> None:
    assert table().assign(["d", "c", "b", "a"]) == {"a": 0, "b": 0, "c": 1, "d": SHARED}
    assert table().assign(["a"]) == {"a": 0}


def test_names_differ() -> None:
    with pytest.raises(ValueError, match="must differ"):
        TierTable.of(1, [Tier("a"), Tier("a")])
