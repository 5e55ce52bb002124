"""A request of several sequences at the controller: all of them or none, in bounded work."""

from typing import Any

import msgspec
import numpy as np
import pytest

from controller import groups, placement
from controller.fleet import Fleet
from controller.placement import Pending
from protocol.messages import Verdict
from routing.fleet_state import FleetState
from routing.placement import place
from tests.support.fleet_cases import FLEX, LOOSE, TIGHT, ask, fleet, group, report


def placed(served: Fleet) -> int:
    return sum(len(replica.table) for replica in served.replicas.values())


def up(**options: object) -> Fleet:
    """Two replicas with eight seats each."""
    served = fleet(**options)  # type: ignore[arg-type]
    for name in "ab":
        served.report(msgspec.structs.replace(report(name), max_running=8), 0.0)
    return served


def test_a_group_that_fits_is_admitted_as_a_whole() -> None:
    served = up()
    decisions = served.admit(group(LOOSE, 6), 0.0)
    assert {d.verdict for d in decisions} == {Verdict.ADMITTED}
    assert placed(served) == 6
    served.check_integrity()


def test_a_group_that_does_not_fit_is_refused_as_a_whole_and_leaves_nothing() -> None:
    served = up()
    served.admit([ask(LOOSE) for _ in range(4)], 0.0)
    decisions = served.admit([*group(LOOSE, 13), ask(LOOSE)], 0.0)
    assert [d.verdict for d in decisions] == [*[Verdict.REFUSED] * 13, Verdict.ADMITTED]
    assert len({(d.reason, d.retry_after_s) for d in decisions[:13]}) == 1
    assert decisions[0].retry_after_s > 0.0, "an emptier fleet could do it"
    assert placed(served) == 5
    served.check_integrity()


def test_what_no_idle_fleet_could_hold_is_not_told_to_come_back() -> None:
    served = up()
    assert {(d.verdict, d.retry_after_s) for d in served.admit(group(LOOSE, 20), 0.0)} == {(Verdict.REFUSED, 0.0)}
    assert len(served.unplaced.returns) == 0, "and no room is kept for it"


def test_where_the_tier_says_so_all_of_it_goes_best_effort() -> None:
    """Nine long prompts, of which only some could be computed in time."""
    served = up()
    decisions = served.admit(group(TIGHT, 9, prompt_tokens=4000), 0.0)
    assert {(d.verdict, d.tier) for d in decisions} == {(Verdict.BEST_EFFORT, "flex")}
    (reason,) = {d.reason for d in decisions}
    assert reason in ("would_break_admitted", "ttft_unattainable"), "who is left over depends on the requests' names"
    assert placed(served) == 9
    served.check_integrity()


def test_none_waits_where_the_first_goes_best_effort() -> None:
    """A long prompt that no idle replica could compute in time, and a short one that by itself could still wait."""
    served = up(pending=True)
    long, short = group(TIGHT, 2)
    decisions = served.admit([msgspec.structs.replace(long, prompt_tokens=20_000), short], 0.0)
    assert [d.verdict for d in decisions] == [Verdict.BEST_EFFORT] * 2
    assert not served.unplaced.waiting


def test_what_the_sums_deny_is_not_searched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "place", lambda *_: pytest.fail("searched"))
    assert {d.verdict for d in up().admit(group(LOOSE, 20), 0.0)} == {Verdict.REFUSED}


def test_most_sequences_are_those_that_find_seats_beside_what_was_promised() -> None:
    """Best effort yields its seat; a closed replica has none."""
    served = up()
    served.admit([*(ask(LOOSE) for _ in range(4)), *(ask(FLEX) for _ in range(3))], 0.0)
    asked = [served._to_pending(each, 0.0) for each in group(LOOSE, 2, prompt_tokens=10)]
    assert groups.most_sequences(served.slots, asked, (), 0.0) == 12
    assert groups.most_sequences(served.slots, asked, (), 0.0, idle=True) == 16
    served.slots.fleet_state.replicas["is_open"][0] = False
    assert groups.most_sequences(served.slots, asked, (), 0.0, idle=True) == 8


def test_a_group_that_waits_waits_as_one() -> None:
    served = up(pending=True)
    served.admit([ask(TIGHT) for _ in range(10)], 0.0)
    asks = group(TIGHT, 8)
    for _ in range(2):
        assert {d.verdict for d in served.admit(asks, 0.0)} == {Verdict.PENDING}
    assert len(served.unplaced.waiting) == 1
    served.check_integrity()


def test_best_effort_sequences_are_placed_one_by_one() -> None:
    assert {d.verdict for d in up().admit(group(FLEX, 20), 0.0)} == {Verdict.ADMITTED}


@pytest.mark.parametrize("count", [40, 400])
def test_work_for_a_group_that_is_refused_does_not_grow_with_its_size(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1,000 sequences took 9 s of the controller, which looked for each of them and asked when it would fit."""
    looked: list[int] = []

    def counted(fleet_state: FleetState, rows: np.ndarray, *arguments: Any) -> None:
        looked.append(len(rows))
        place(fleet_state, rows, *arguments)

    monkeypatch.setattr(placement, "place", counted)
    monkeypatch.setattr(groups, "most_sequences", lambda *_, **__: count)  # nothing is known beforehand
    fallen: list[int] = []
    served = up()
    fall_back = served._best_effort_or_refuse

    def noted(p: Pending, now_s: float) -> Any:
        fallen.append(p.tier)
        return fall_back(p, now_s)

    monkeypatch.setattr(served, "_best_effort_or_refuse", noted)
    assert {d.verdict for d in served.admit(group(LOOSE, count), 0.0)} == {Verdict.REFUSED}
    assert sum(looked) <= 2 * groups.CHUNK
    assert len(fallen) == 1
