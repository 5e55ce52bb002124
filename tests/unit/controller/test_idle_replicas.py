"""What was measured of a replica in a bad time does not hold for ever: idle replicas are trusted again."""

import pytest

from controller.fleet import Fleet
from controller.status import fleet_status
from profiles.kernels import iteration_s
from profiles.online import HALF_LIFE_S
from profiles.store import load_profile
from protocol.messages import Decision, Step, Verdict
from tests.support.fleet_cases import H200, LOOSE, ask, fleet, report

PROMPT_TOKENS = 8000
REPORTS_S = 0.5


def stalled(times: float) -> Fleet:
    """A fleet of one replica whose iterations lately took so many times what its profile says."""
    state = fleet(pending=True)
    usual_s = iteration_s(load_profile(H200).coefficients, 100.0, 5000.0, 0.0, 10.0, 0.0)
    steps = tuple(Step(100.0, 5000.0, 0.0, 10.0, 0.0, times * usual_s) for _ in range(60))
    state.report(report("a", 1), 0.0)
    state.report(report("a", 2, steps=steps), 1.0)
    return state


def idle_until(state: Fleet, from_s: float, until_s: float) -> None:
    for k in range(int((until_s - from_s) / REPORTS_S) + 1):
        at_s = from_s + k * REPORTS_S
        state.report(report("a", 10 + int(at_s / REPORTS_S)), at_s)


def one(state: Fleet, now_s: float) -> Decision:
    return state.admit([ask(LOOSE, PROMPT_TOKENS)], now_s)[0]


def slope(state: Fleet) -> float:
    return float(fleet_status(state, 0.0)["replicas"][0]["drift"]["slope"])


def test_a_fleet_that_stalled_takes_requests_again_after_some_idle_minutes() -> None:
    """Refused requests would make no iterations by which it could be seen that the stall is over."""
    state = stalled(20.0)
    refused = one(state, 1.1)
    assert refused.verdict == Verdict.REFUSED
    assert refused.retry_after_s == state.options.retry_cap_s, "it may pass: there is no never"
    idle_until(state, 1.5, 1.0 + 6 * HALF_LIFE_S)
    assert one(state, 1.1 + 6 * HALF_LIFE_S).verdict == Verdict.ADMITTED
    assert slope(state) == pytest.approx(1.3, abs=0.15)


def test_what_a_healthy_replica_can_never_do_is_told_no_time() -> None:
    state = stalled(1.0)
    hopeless = state.admit([ask(LOOSE, 300_000)], 1.1)[0]
    assert (hopeless.verdict, hopeless.retry_after_s) == (Verdict.REFUSED, 0.0)


def test_a_busy_replica_keeps_what_was_measured() -> None:
    state = stalled(20.0)
    for k in range(100):
        state.report(report("a", 10 + k, age_s=0.2), 2.0 + REPORTS_S * k)
    assert slope(state) == pytest.approx(20.0, rel=0.05)
