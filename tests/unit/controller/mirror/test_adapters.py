"""Which LoRA adapters a replica presumably holds."""

import numpy as np

from controller.mirror.adapters import HeldAdapters


def test_least_recently_used_goes_first() -> None:
    held = HeldAdapters()
    for uid, name in enumerate(("a", "b", "a", "c")):
        held.record(name, uid, 2)
    assert "a" in held
    assert "c" in held
    assert "b" not in held


def test_in_use_is_what_live_requests_ask_for() -> None:
    held = HeldAdapters()
    held.record("a", 1, 4)
    held.record("b", 2, 4)
    assert held.in_use(np.array([2, 9]), 1) == {"b"}
    assert held.in_use(np.array([1, 2]), 2) == {"b"}, "request 1 has ended"
    assert "a" in held, "its weights are still there"


def test_requests_are_gone_through_again_when_they_may_have_changed() -> None:
    """With as many adapters in use as fit, every question asks this of every replica."""
    held, nobody = HeldAdapters(), np.zeros(0, dtype=np.int64)
    held.record("a", 1, 4)
    assert held.in_use(np.array([1]), (7, 1)) == {"a"}
    assert held.in_use(nobody, (7, 1)) == {"a"}, "the same requests, which nobody looks at"
    held.record("b", 2, 4)
    assert held.in_use(np.array([1, 2]), (7, 1)) == {"a", "b"}
    assert held.in_use(nobody, (8, 0)) == set()
