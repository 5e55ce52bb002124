"""What requests of several sequences are told that are refused: never is said only of what no idle fleet could do."""

from typing import Any

import msgspec
import pytest

from controller import groups
from protocol.messages import Decision, Verdict
from tests.support.fleet_cases import LOOSE, fleet, group, report
from tests.unit.controller.test_idle_replicas import after, measured
from tests.unit.controller.test_returns import again, busy


def told_s(count: int, margin: float = 0.0) -> float:
    """The time told to so many long prompts together, of a tier that plans its requests earlier by a margin."""
    state = fleet()
    state.report(report("a", 1, busy()), 0.0)
    state.calibration.margins["loose"] = margin
    (wait_s,) = {d.retry_after_s for d in state.admit(group(LOOSE, count, prompt_tokens=8000), 0.0)}
    return wait_s


def test_a_margin_that_may_pass_is_no_reason_for_never() -> None:
    assert 1.0 <= told_s(14) < 30.0
    assert told_s(14, margin=0.5) == 30.0
    assert told_s(100) == told_s(100, margin=0.5) == 0.0


def test_a_slow_spell_is_no_reason_for_never() -> None:
    state = after(*[measured(20.0)] * 3)
    assert state.slots.liveness["is_slowed"].any()
    for count, wait_s in ((8, 30.0), (100, 0.0)):
        decisions = state.admit(group(LOOSE, count, prompt_tokens=8000), 3.1)
        assert {(d.verdict, d.retry_after_s) for d in decisions} == {(Verdict.REFUSED, wait_s)}


@pytest.mark.parametrize(("count", "walks"), [(14, 2), (100, 3)])
def test_what_may_pass_is_asked_only_about_a_group_that_no_idle_fleet_could_hold(
    monkeypatch: pytest.MonkeyPatch, count: int, walks: int
) -> None:
    """Each answer walks through all replicas, and a group that waits asks several times a second."""
    asked, answer = list[bool](), groups.most_sequences

    def noted(*args: Any, **how: Any) -> int:
        asked.append("at_best" in how)
        return answer(*args, **how)

    monkeypatch.setattr(groups, "most_sequences", noted)
    told_s(count)
    assert asked == [False, False, True][:walks]


@pytest.mark.parametrize("count", [6, 12])
def test_a_group_that_returns_and_waits_in_vain_is_told_another_time(count: int) -> None:
    """In what was left of its time not even an idle fleet could serve it, which was taken for never."""
    state = fleet(pending=True)
    state.report(report("a", 1, busy()), 0.0)
    asks = [msgspec.structs.replace(a, prompt_digest=7) for a in group(LOOSE, count, prompt_tokens=6000)]
    back_s = state.admit(asks, 0.0)[0].retry_after_s
    assert 1.0 <= back_s < 30.0
    back, now_s, sequence, decisions = again(asks), back_s, 1, list[Decision]()
    while not decisions or decisions[0].verdict == Verdict.PENDING:
        now_s += decisions[0].retry_after_s if decisions else 0.0
        state.report(report("a", sequence := sequence + 1, busy()), now_s)
        decisions = state.admit([msgspec.structs.replace(a, age_s=now_s - back_s) for a in back], now_s)
    assert now_s > back_s + 1.0
    assert {d.verdict for d in decisions} == {Verdict.REFUSED}
    assert all(1.0 <= d.retry_after_s < 30.0 for d in decisions)
