"""Clients that return when they were told, beside others that ask in the same moment."""

from collections import Counter

import msgspec
import pytest

from controller.fleet import Fleet
from controller.options import DP, GREEDY
from protocol.messages import AdmissionRequest, Verdict, request_uid
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
