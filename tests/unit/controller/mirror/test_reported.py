"""A replica that tells each request once, and then only how far it is, is mirrored as one that tells everything."""

import msgspec
import numpy as np
import pytest

from controller.fleet import Fleet
from controller.lengths.estimate import LengthEstimate
from controller.mirror.reported import only_in
from planning.tables import request_table
from protocol.messages import AdmissionRequest, Progress
from replicas.told_requests import ToldRequests
from tests.support.fleet_cases import FLEX, LOOSE, TIERS, TIGHT, fleet, report

SLOS = (TIGHT, LOOSE, FLEX)


def request(number: int, emitted_tokens: int, age_s: float) -> Progress:
    computed = 499 + emitted_tokens if emitted_tokens else 0
    return Progress(f"r{number}", SLOS[number % 3], age_s, 500, computed, emitted_tokens, 150, 200, emitted_tokens > 0)


def at(now_s: float, alive: range) -> tuple[Progress, ...]:
    """What the replica holds: request ``n`` arrived at ``0.1 n`` and emits every 0.02 s."""
    ages_s = {number: now_s - 0.1 * number for number in alive}
    return tuple(request(number, int(age_s / 0.02), age_s) for number, age_s in ages_s.items())


def table(state: Fleet) -> np.ndarray:
    return state.replicas["a"].table.copy()


def test_positions_say_the_same_as_whole_reports() -> None:
    whole, moved, told = fleet(), fleet(), ToldRequests()
    for sequence, alive in enumerate([range(3), range(4), range(1, 6), range(2, 6), range(5, 6), range(0)], 1):
        now_s = 0.7 + 0.15 * sequence
        whole.report(report("a", sequence, at(now_s, alive)), now_s)
        new, positions = told.split(at(now_s, alive))
        assert len(new) <= 3
        known = msgspec.structs.replace(report("a", sequence, new, positions=positions), age_s=40.0 + now_s)
        assert moved.report(known, now_s)
        told.record(known)
        for name in table(whole).dtype.names or ():
            np.testing.assert_allclose(table(moved)[name], table(whole)[name], rtol=1e-12, err_msg=name)
        moved.check_integrity()


def test_what_was_never_told_is_asked_for() -> None:
    """A controller that was restarted between two reports."""
    told = ToldRequests()
    first = report("a", 1, *told.split(at(1.0, range(3)))[:1])
    told.record(first)
    reborn = fleet()
    new, positions = told.split(at(1.15, range(4)))
    assert [r.request_id for r in new] == ["r3"]
    assert not reborn.report(report("a", 2, new, positions=positions), 1.15)
    assert len(table(reborn)) == 0
    told.forget()
    new, positions = told.split(at(1.3, range(4)))
    assert reborn.report(report("a", 3, new, positions=positions), 1.3)
    assert len(table(reborn)) == 4


def test_another_tier_table_has_everything_told_anew() -> None:
    state, told = fleet(), ToldRequests()
    new, _ = told.split(at(1.0, range(3)))
    first = report("a", 1, new)
    state.report(first, 1.0)
    told.record(first)
    assert state.set_tiers(msgspec.structs.replace(TIERS, version=2), 1.1)
    before = table(state)
    new, positions = told.split(at(1.15, range(3)))
    assert not state.report(report("a", 2, new, positions=positions), 1.15)
    assert len(table(state)) == len(before), "its rows are as they were until then"


@pytest.mark.parametrize(
    ("ids", "others", "left"), [([1, 2, 3], [2], [1, 3]), ([3, 1, 2], [1, 2, 3], []), ([1], [], [1]), ([], [1], [])]
)
def test_only_in_is_the_difference_in_any_order(ids: list[int], others: list[int], left: list[int]) -> None:
    tables = [request_table(len(each)) for each in (ids, others)]
    for each, numbers in zip(tables, (ids, others), strict=True):
        each["id"] = numbers
    assert only_in(*tables).tolist() == left


def test_a_request_that_no_longer_runs_was_preempted() -> None:
    state, told = fleet(), ToldRequests()
    running = request(0, 20, 0.5)
    first = report("a", 1, (running,))
    told.record(first)
    state.report(first, 1.0)
    assert table(state)["preempted_at"].tolist() == [0]
    waits = msgspec.structs.replace(running, computed_tokens=0, running=False, age_s=0.65)
    new, positions = told.split((waits,))
    state.report(report("a", 2, new, positions=positions), 1.15)
    assert table(state)["preempted_at"].tolist() == [21]
    resumed = msgspec.structs.replace(running, emitted_tokens=22, computed_tokens=521, age_s=0.8)
    new, positions = told.split((resumed,))
    state.report(report("a", 3, new, positions=positions), 1.3)
    assert table(state)["preempted_at"].tolist() == [21]


def test_lengths_are_looked_up_of_those_decided_here_and_of_others_that_outlive_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state, told, asked = fleet(), ToldRequests(), list[str]()
    state.report(report("a", 1), 0.0)
    state.admit([AdmissionRequest("r1", 500, 200, LOOSE)], 0.9)
    further = state.lengths.further

    def noted(seen: Progress, *so_far: int) -> LengthEstimate:
        asked.append(seen.request_id)
        return further(seen, *so_far)

    monkeypatch.setattr(state.lengths, "further", noted)
    for sequence, now_s in enumerate((1.1, 1.2, 2.1, 4.2), 2):
        asked.clear()
        new, positions = told.split(at(now_s, range(3)))
        message = msgspec.structs.replace(report("a", sequence, new, positions=positions), age_s=now_s)
        assert state.report(message, now_s)
        told.record(message)
        assert asked == {1.1: ["r0", "r1", "r2"], 1.2: [], 2.1: ["r1"], 4.2: ["r0", "r1", "r2"]}[now_s], now_s
