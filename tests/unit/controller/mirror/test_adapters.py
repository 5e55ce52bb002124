"""Which LoRA adapters a replica presumably holds."""

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


def test_in_use_is_what_live_requests_ask_for() -> None:
    held = HeldAdapters()
    held.record("a", 1, 4, NOBODY)
    held.record("b", 2, 4, NOBODY)
    assert held.in_use(np.array([2, 9]), 1) == {"b"}
    assert held.in_use(np.array([1, 2]), 2) == {"b"}, "request 1 has ended"
    assert "a" in held, "its weights are still there"


def test_requests_are_gone_through_again_when_they_may_have_changed() -> None:
    """With as many adapters in use as fit, every question asks this of every replica."""
    held = HeldAdapters()
    held.record("a", 1, 4, NOBODY)
    assert held.in_use(np.array([1]), (7, 1)) == {"a"}
    assert held.in_use(NOBODY, (7, 1)) == {"a"}, "the same requests, which nobody looks at"
    held.record("b", 2, 4, NOBODY)
    assert held.in_use(np.array([1, 2]), (7, 1)) == {"a", "b"}
    assert held.in_use(NOBODY, (8, 0)) == set()


def test_users_that_have_left_are_cleared_away_also_while_nobody_asks_which_are_in_use() -> None:
    held, there = HeldAdapters(), np.arange(10, dtype=np.int64)
    for uid in range(1000):
        held.record("a", uid, 4, there)
    assert len(held._uids["a"]) <= 2 * len(there) + SPARE
    assert held.in_use(there, 1) == {"a"}
