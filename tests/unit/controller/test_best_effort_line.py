"""Best effort beyond what replicas hold: it waits at the ingress, first come first served, and asks seldom."""

import heapq
from dataclasses import dataclass

import msgspec
import pytest

from controller.best_effort_line import ASK_S, GRACE_S, SPREAD, BestEffortLine
from controller.status import fleet_status
from protocol.messages import AdmissionRequest, Progress, Report, Slo, Verdict
from tests.support.fleet_cases import FLEX, TIGHT, ask, ended, fleet, report

LONGEST_S = ASK_S[1] * (1.0 + SPREAD / 2)


def test_without_free_places_requests_wait_and_go_in_by_arrival_not_by_who_asks_first() -> None:
    line = BestEffortLine()
    assert all(line.wait_s(uid, float(uid), 0, 10.0) > 0.0 for uid in (3, 1, 2))
    assert line.wait_s(3, 3.0, 2, 10.1) > 0.0, "two are ahead of it, and two places free"
    assert line.wait_s(4, 10.1, 2, 10.1) > 0.0, "a newcomer takes nobody's place"
    assert line.wait_s(1, 1.0, 2, 10.1) == 0.0
    assert line.wait_s(2, 2.0, 1, 10.1) == 0.0
    assert line.wait_s(3, 3.0, 1, 10.1) == 0.0
    assert len(line) == 1


def test_one_that_ended_or_asks_no_more_holds_up_nobody() -> None:
    line = BestEffortLine()
    waits_s = {uid: line.wait_s(uid, float(uid), 0, 10.0) for uid in (1, 2, 3)}
    line.leave(1)
    silent_s = 10.0 + waits_s[2] + GRACE_S + 0.1
    assert line.wait_s(3, 3.0, 1, silent_s - 0.2) > 0.0, "the second may still come"
    assert line.wait_s(3, 3.0, 1, silent_s + 1.0) == 0.0
    assert line.wait_s(2, 2.0, 0, silent_s + 1.0) > 0.0
    assert line.wait_s(5, 9.0, 1, silent_s + 1.1) > 0.0, "it has its position again, by its arrival"


@dataclass
class Drained:
    """What came of a burst: when each went in, when everybody asked."""

    in_s: dict[int, float]
    asked_s: list[float]


def drain(count: int, places_per_s: float) -> Drained:
    """A burst of requests at one instant, and places that come free at an even pace."""
    line, again, seen = BestEffortLine(), [(0.0, uid) for uid in range(count)], Drained({}, [])
    while again:
        now_s, uid = heapq.heappop(again)
        seen.asked_s.append(now_s)
        assert len(seen.asked_s) < 100 * count, "it ends"
        wait_s = line.wait_s(uid * 7919, uid * 1e-6, int(now_s * places_per_s) - len(seen.in_s), now_s)
        if wait_s == 0.0:
            seen.in_s[uid] = now_s
        else:
            assert wait_s <= LONGEST_S
            heapq.heappush(again, (now_s + wait_s, uid))
    assert len(line) == 0
    return seen


@pytest.mark.parametrize(("count", "places_per_s"), [(300, 20.0), (2000, 100.0), (2000, 1000.0), (4000, 50.0)])
def test_a_burst_drains_by_arrival_as_fast_as_places_come_free_with_few_questions(
    count: int, places_per_s: float
) -> None:
    seen = drain(count, places_per_s)
    late_s = [seen.in_s[uid] - (uid + 1) / places_per_s for uid in range(count)]
    assert min(late_s) >= -2 * LONGEST_S, "who goes in early leaves a place to each that is ahead"
    assert max(late_s) <= 3.0 + 0.3 * count / places_per_s, "nobody is left behind"
    assert len(seen.asked_s) <= 12 * count
    again = [int(at_s / 0.1) for at_s in seen.asked_s[count:]]
    assert max(map(again.count, set(again))) <= 150, "they do not come back together"


def full_of_best_effort(replica: str, sequence: int, rows: int) -> Report:
    held = tuple(Progress(f"{replica}{i}", FLEX, 9.0, 500, 0, 0, 100, 200, False) for i in range(rows))
    return report(replica, sequence, held)


def test_replicas_hold_no_more_best_effort_than_their_cap_and_the_rest_is_told_when_to_ask() -> None:
    state = fleet(best_effort_backlog=0.05)  # of 256 sequences: 13
    for name in ("a", "b"):
        state.report(report(name), 0.0)
    asks = [ask(FLEX) for _ in range(40)]
    decisions = state.admit(asks, 0.0)
    assert [d.verdict for d in decisions] == [Verdict.ADMITTED] * 26 + [Verdict.PENDING] * 14
    assert {int(r.state[0]["best_effort"]) for r in state.replicas.values()} == {13}
    assert all(0.0 < d.retry_after_s <= LONGEST_S for d in decisions[26:])
    assert fleet_status(state, 0.0)["best_effort_waiting"] == 14
    for done in asks[:3]:
        state.on_outcome(ended(done, "length", 10), 0.5)
    again = [msgspec.structs.replace(a, age_s=0.6) for a in reversed(asks[26:])]
    let_in = [d.request_id for d in state.admit(again, 0.6) if d.verdict == Verdict.ADMITTED]
    assert set(let_in) == {a.request_id for a in asks[26:29]}, "the first in line, whoever asks first"
    state.on_outcome(ended(asks[30], "abort"), 0.7)
    assert fleet_status(state, 0.7)["best_effort_waiting"] == 10
    state.check_integrity()


def test_a_stream_that_resumes_and_a_request_with_a_promise_need_no_place_in_the_line() -> None:
    state = fleet(best_effort_backlog=0.05)
    state.report(full_of_best_effort("a", 1, 13), 0.0)
    resumed, promised, new = state.admit([ask(FLEX, emitted_tokens=7), ask(TIGHT), ask(FLEX)], 0.0)
    assert [d.verdict for d in (resumed, promised, new)] == [Verdict.ADMITTED, Verdict.ADMITTED, Verdict.PENDING]


def test_what_is_downgraded_waits_in_the_same_line() -> None:
    state = fleet(best_effort_backlog=0.05)
    state.report(full_of_best_effort("a", 1, 13), 0.0)
    late: AdmissionRequest = ask(Slo(0.001, 0.03, tier="tight"), 3000)
    assert state.admit([late], 0.0)[0].verdict == Verdict.PENDING
    state.report(report("a", 2), 1.0)
    assert state.admit([msgspec.structs.replace(late, age_s=1.0)], 1.0)[0].verdict == Verdict.BEST_EFFORT
    assert state.unplaced.waiting == {}
    assert len(state.unplaced.line) == 0
