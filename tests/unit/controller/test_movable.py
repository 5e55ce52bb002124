"""The index of requests that may lose their places, beside a walk over all of them."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.movable import Movable

SLOT, UID, TOKENS = st.integers(0, 3), st.integers(0, 8), st.integers(1, 5)
STEPS = st.lists(st.tuples(st.sampled_from(["add", "leave"]), UID, SLOT, TOKENS))


@given(STEPS)
def test_each_slot_tells_its_longest_prompt_and_its_least_value(steps: list[tuple[str, int, int, int]]) -> None:
    there = dict[int, SimpleNamespace]()
    movable = Movable(there.get)  # type: ignore[arg-type]
    for what, uid, slot, tokens in steps:
        if what == "leave":
            there.pop(uid, None)
        elif uid not in there:
            request = SimpleNamespace(prompt_tokens=tokens + 10 * uid)  # a request keeps its figures
            there[uid] = SimpleNamespace(row={"id": uid, "value": np.float64(uid % 3)}, request=request, slot=slot)
            movable.add(there[uid])  # type: ignore[arg-type]
        told = {slot: (longest, least) for slot, longest, least in movable.by_slot()}
        walked = {
            slot: (
                max(p.request.prompt_tokens for p in there.values() if p.slot == slot),
                min(float(p.row["value"]) for p in there.values() if p.slot == slot),
            )
            for slot in {p.slot for p in there.values()}
        }
        assert told == walked


@pytest.mark.parametrize("quiet", [0, 2000])
def test_entries_of_requests_that_left_are_cleared_away(quiet: int) -> None:
    """Also while all find places and nobody asks for those of others: a fleet with room kept two for each request."""
    there = dict[int, SimpleNamespace]()
    movable = Movable(there.get)  # type: ignore[arg-type]
    for uid in range(2000):
        there.pop(uid - 2, None)
        request = SimpleNamespace(prompt_tokens=10_000 - uid)
        there[uid] = SimpleNamespace(row={"id": uid, "value": 1.0}, request=request, slot=0)
        movable.add(there[uid])  # type: ignore[arg-type]
        there[0] = there.get(0) or there[uid]  # the longest stays, so that no other comes to the top
        if uid >= quiet:
            movable.by_slot()
    assert len(movable._least[0]) < 200
