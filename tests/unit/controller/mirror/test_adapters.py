"""Which LoRA adapters a replica presumably holds."""

from collections.abc import Hashable

import numpy as np

from controller.mirror.adapters import SPARE, HeldAdapters

NOBODY = np.zeros(0, dtype=np.int64)


def test_least_recently_used_goes_first() -> None:
    held = HeldAdapters()
    for uid, name in enumerate(("a", "b", "a", "c")):
        held.record(name, uid, 2, NOBODY)
    assert "a" in held
    assert "c" in held
    assert "b" not in held


def in_use(held: HeldAdapters, ids: list[int], version: Hashable, best_effort: tuple[int, ...] = ()) -> list[set[str]]:
    table = np.array(ids, dtype=np.int64)
    return [*held.in_use(table, np.isin(table, best_effort), version)]


def test_in_use_is_what_live_requests_ask_for() -> None:
    held = HeldAdapters()
    held.record("a", 1, 4, NOBODY)
    held.record("b", 2, 4, NOBODY)
    assert in_use(held, [2, 9], 1) == [{"b"}, {"b"}]
    assert in_use(held, [1, 2], 2) == [{"b"}, {"b"}], "request 1 has ended"
    assert "a" in held, "its weights are still there"


def test_what_only_best_effort_uses_is_told_apart() -> None:
    held = HeldAdapters()
    for uid, adapter in enumerate("aabb"):
        held.record(adapter, uid, 4, NOBODY)
    assert in_use(held, [0, 1, 2, 3], 1, best_effort=(1, 2, 3)) == [{"a", "b"}, {"a"}]


def test_requests_are_gone_through_again_when_they_may_have_changed() -> None:
    """With as many adapters in use as fit, every question asks this of every replica."""
    held = HeldAdapters()
    held.record("a", 1, 4, NOBODY)
    assert in_use(held, [1], (7, 1))[0] == {"a"}
    assert in_use(held, [], (7, 1))[0] == {"a"}, "the same requests, which nobody looks at"
    held.record("b", 2, 4, NOBODY)
    assert in_use(held, [1, 2], (7, 1))[0] == {"a", "b"}
    assert in_use(held, [], (8, 0))[0] == set()


def test_users_that_have_left_are_cleared_away_also_while_nobody_asks_which_are_in_use() -> None:
    held, there = HeldAdapters(), np.arange(10, dtype=np.int64)
    for uid in range(1000):
        held.record("a", uid, 4, there)
    assert len(held._uids["a"]) <= 2 * len(there) + SPARE
    assert in_use(held, there.tolist(), 1)[0] == {"a"}
