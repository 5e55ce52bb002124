"""Clients that return when they were told, beside others that ask in the same moment."""

from collections import Counter

import msgspec
import pytest

from controller.fleet import Fleet
from controller.options import DP, GREEDY
from protocol.messages import AdmissionRequest, Progress, Verdict, request_uid
from tests.support.fleet_cases import LOOSE, ask, fleet, report
from tests.unit.controller.test_returns import busy


def one_refused(**options: object) -> tuple[Fleet, AdmissionRequest, float]:
    """A fleet that was full, the long prompt that it refused, and the second that was told."""
    state, asked = fleet(**options), ask(LOOSE, 8000, prompt_digest=7)  # type: ignore[arg-type]
    state.report(report("a", 1, busy()), 0.0)
    (decision,) = state.admit([asked], 0.0)
    assert decision.verdict == Verdict.REFUSED
    assert 1.0 <= decision.retry_after_s < 30.0
    return state, asked, decision.retry_after_s


@pytest.mark.parametrize("selection", [DP, GREEDY])
def test_no_burst_of_short_newcomers_takes_the_place_of_one_that_returns_as_told(selection: str) -> None:
    state, asked, told_s = one_refused(selection=selection)
    state.report(report("a", 2), told_s)
    newcomers = [ask(LOOSE, 3000, prompt_digest=100 + i) for i in range(60)]
    back, *others = state.admit([msgspec.structs.replace(asked, request_id="back"), *newcomers], told_s)
    assert back.verdict == Verdict.ADMITTED
    assert Counter(d.verdict for d in others)[Verdict.REFUSED] > 5, "they do not all fit"
    state.check_integrity()


def test_requests_that_wait_take_no_time_of_a_client_with_the_same_prompt() -> None:
    """Held ones ask again several times a second, and would come before it at any time."""
    state, asks = fleet(pending=True), [ask(LOOSE, 8000, prompt_digest=7) for _ in range(60)]
    state.report(report("a"), 0.0)
    told = {d.request_id: d for d in state.admit(asks, 0.0)}
    held = [each for each in asks if request_uid(each.request_id) in state.held]
    due = [each for each in asks if told[each.request_id].retry_after_s == 1.0]
    assert len(held) > 3
    assert len(due) > 3
    state.report(report("a", 2), 0.95)
    state.admit([msgspec.structs.replace(each, age_s=0.95) for each in held], 0.95)
    returns = state.unplaced.returns
    assert returns.share.came == 0.0, "nobody has returned"
    state.admit([msgspec.structs.replace(each, request_id=f"{each.request_id} again") for each in due], 1.0)
    assert returns.share.came == len(due)


def test_one_that_returns_as_told_and_has_to_wait_keeps_the_place_that_it_finds_then() -> None:
    """It was held like any other, newcomers took its place, and it was told another time."""
    state, asked, told_s = one_refused(pending=True)
    state.report(report("a", 2, busy()), told_s)
    back = msgspec.structs.replace(asked, request_id="back")
    (decision,) = state.admit([back], told_s)
    assert decision.verdict == Verdict.PENDING
    now_s = told_s + decision.retry_after_s
    queue = tuple(Progress(f"p{i}", LOOSE, 0.5, 8000, 0, 0, 100, 200, i == 0) for i in range(8))
    state.report(report("a", 3, queue), now_s)
    (decision,) = state.admit([msgspec.structs.replace(back, age_s=now_s - told_s)], now_s, "ingress")
    others = state.admit([ask(LOOSE, 2000, prompt_digest=200 + i) for i in range(60)], now_s)
    assert decision.verdict == Verdict.ADMITTED
    assert Verdict.REFUSED in {d.verdict for d in others}, "they do not all fit"
    assert state.places.holder(request_uid("back")) == "a"
    assert not state.held.take_recalls()
    state.check_integrity()


def test_one_that_returns_as_told_while_its_ingress_doubts_all_replicas_may_still_wait_after_that() -> None:
    """Nobody knew any more that it had come as told: it was refused when the replica was known to be well."""
    state, asked, told_s = one_refused(pending=True)
    state.report(report("a", 2, busy()), told_s)
    state.on_failed("a", told_s)
    back, now_s, sequence, reasons = msgspec.structs.replace(asked, request_id="back"), told_s, 2, list[str]()
    while not reasons or reasons[-1] == "no_replica":
        (decision,) = state.admit([msgspec.structs.replace(back, age_s=now_s - told_s)], now_s)
        assert decision.verdict == Verdict.PENDING
        reasons.append(decision.reason)
        now_s += decision.retry_after_s
        state.report(report("a", sequence := sequence + 1, busy()), now_s)
    assert 1.0 < now_s - told_s < LOOSE.ttft_s
    state.report(report("a", sequence + 1), now_s)
    (decision,) = state.admit([msgspec.structs.replace(back, age_s=now_s - told_s)], now_s)
    assert decision.verdict == Verdict.ADMITTED
    assert not state.unplaced.waiting


def test_who_is_refused_after_waiting_is_told_the_time_of_one_that_comes_anew() -> None:
    def told_s(age_s: float) -> float:
        state = fleet()
        state.report(report("a"), 0.0)
        state.admit([ask(LOOSE, 8000, prompt_digest=100 + i) for i in range(60)], 0.0)
        (decision,) = state.admit([ask(LOOSE, 8000, prompt_digest=7, age_s=age_s)], 0.0)
        assert decision.verdict == Verdict.REFUSED
        return decision.retry_after_s

    assert 1.0 <= told_s(0.0) < 30.0
    assert told_s(0.95 * LOOSE.ttft_s) == told_s(0.0)
