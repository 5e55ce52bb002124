"""The tier table and its static assignment."""

import pytest

from controller.tiers import Tier, TierTable
from routing.policy import SHARED


def table() -> TierTable:
    return TierTable.of(
        1, [Tier("batch", best_effort=True), Tier("loose", 2.0, 0.1, replicas=1), Tier("tight", 0.3, 0.02, replicas=2)]
    )


def test_tiers_are_ordered_from_tight_to_best_effort() -> None:
    assert [tier.name for tier in table().tiers] == ["tight", "loose", "batch"]
    assert table().index("loose") == 1
    assert table().index("gone") == 2


def test_assignment_serves_the_tightest_first_and_shares_the_rest() -> None:
    assert table().assign(["d", "c", "b", "a"]) == {"a": 0, "b": 0, "c": 1, "d": SHARED}
    assert table().assign(["a"]) == {"a": 0}


def test_names_differ() -> None:
    with pytest.raises(ValueError, match="must differ"):
        TierTable.of(1, [Tier("a"), Tier("a")])
