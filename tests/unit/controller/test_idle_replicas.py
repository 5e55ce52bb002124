"""What was measured of a replica in a bad time does not hold for ever; what no idle one could do is never promised."""

import numpy as np
import pytest

from controller.fleet import Fleet
from controller.mirror.correction import USUAL_HALF_LIFE_S
from controller.status import fleet_status
from profiles.kernels import iteration_s
from profiles.online import HALF_LIFE_S
from profiles.store import load_profile
from protocol.messages import Decision, Slo, Step, Verdict
from tests.support.fleet_cases import H200, LOOSE, ask, fleet, report

PROMPT_TOKENS = 8000
MINUTES = 60.0


def measured(times: float, more_s: float = 0.0, iterations: int = 60, noise: float = 0.0) -> tuple[Step, ...]:
    """Iterations that took so many times what the profile says, and ``more_s``; mixed ones."""
    random, coef, found = np.random.default_rng(1), load_profile(H200).coefficients, []
    for k in range(iterations):
        batch = (20.0 + 40.0 * (k % 7), 5000.0 + 100.0 * k, 0.0, 10.0 + k % 7, 0.0)
        found.append(Step(*batch, (times * iteration_s(coef, *batch) + more_s) * random.lognormal(0.0, noise)))
    return tuple(found)


def after(*steps: tuple[Step, ...]) -> Fleet:
    """A fleet of one replica that has told these iterations, a report of them a second."""
    state = fleet(pending=True)
    for second, told in enumerate(((), *steps)):
        state.report(report("a", 1 + second, steps=told), float(second))
    return state


def idle(state: Fleet, from_s: float, for_s: float) -> None:
    for at_s in np.arange(from_s + 1.0, from_s + for_s + 1.0, 1.0).tolist():
        state.report(report("a", 100 + int(at_s)), at_s)


def one(state: Fleet, now_s: float, slo: Slo = LOOSE) -> Decision:
    return state.admit([ask(slo, PROMPT_TOKENS)], now_s)[0]


def slope(state: Fleet) -> float:
    return float(fleet_status(state, 0.0)["replicas"][0]["drift"]["slope"])


@pytest.mark.parametrize(
    "stall",
    [measured(20.0), measured(1.0, more_s=0.15), measured(9.0, noise=1.0)],
    ids=["slow", "every iteration longer", "erratic"],
)
def test_a_fleet_that_stalled_takes_requests_again_after_some_idle_minutes(stall: tuple[Step, ...]) -> None:
    """Refused requests would make no iterations by which it could be seen that the stall is over."""
    state = after(*[measured(1.0)] * 5, stall)
    tight = Slo(1.2, 0.1, tier="loose")
    refused = one(state, 6.1, tight)
    assert refused.verdict == Verdict.REFUSED
    assert refused.retry_after_s == state.options.retry_cap_s, "it may pass: there is no never"
    idle(state, 7.0, 15 * MINUTES)
    assert one(state, 7.5 + 15 * MINUTES, tight).verdict == Verdict.ADMITTED


def test_hardware_that_is_slower_for_good_stays_known_over_a_quiet_night() -> None:
    state = after(*[measured(1.6)] * 40)
    idle(state, 41.0, 10 * HALF_LIFE_S)
    assert slope(state) == pytest.approx(1.6, abs=0.15)


def test_hardware_that_is_faster_than_its_profile_stays_known_as_that() -> None:
    state = after(*[measured(0.5)] * 20)
    idle(state, 21.0, 10 * HALF_LIFE_S)
    assert slope(state) == pytest.approx(0.5, abs=0.05)


def test_a_replica_that_was_never_seen_well_is_taken_at_its_profiles_word_in_the_end() -> None:
    state = after(*[measured(20.0)] * 3)
    idle(state, 4.0, 10 * HALF_LIFE_S)
    assert slope(state) > 1.3, "what was usual of it, as far as that may be hardware"
    idle(state, 4.0 + 10 * HALF_LIFE_S, 5 * USUAL_HALF_LIFE_S)
    assert slope(state) == pytest.approx(1.0, abs=0.1)


def test_what_a_healthy_replica_can_never_do_is_told_no_time() -> None:
    hopeless = after(measured(1.0)).admit([ask(LOOSE, 300_000)], 2.1)[0]
    assert (hopeless.verdict, hopeless.retry_after_s) == (Verdict.REFUSED, 0.0)


def test_what_no_replica_could_do_however_well_is_told_no_time_while_one_is_slow_either() -> None:
    state = after(*[measured(20.0)] * 3)
    assert state.slots.liveness["is_slowed"].any()
    measured_coefs = state.slots.fleet_state.pessimistic_coefs.copy()
    impossible, slow_now = state.admit([ask(Slo(0.001, 0.1, tier="loose")), ask(LOOSE, 8000)], 3.1)
    assert (impossible.verdict, impossible.retry_after_s) == (Verdict.REFUSED, 0.0)
    assert (slow_now.verdict, slow_now.retry_after_s) == (Verdict.REFUSED, state.options.retry_cap_s)
    assert np.array_equal(state.slots.fleet_state.pessimistic_coefs, measured_coefs)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (Slo(0.001, 0.1, tier="tight"), "ttft_unattainable"),
        (Slo(0.5, 0.0001, tier="tight"), "tpot_unattainable"),
        (Slo(tpot_s=0.0001, tier="tight"), "tpot_unattainable"),
        (Slo(e2e_s=0.3, tier="tight"), "deadline_unattainable"),
        (Slo(0.3, e2e_s=0.3, tier="tight"), "deadline_unattainable"),
        (Slo(600.0, e2e_s=0.005, tier="tight"), "deadline_unattainable"),  # late before its first token
        (Slo(0.5, 0.1, e2e_s=0.005, tier="tight"), "deadline_unattainable"),
    ],
)
def test_the_reason_names_the_part_that_an_idle_replica_lacks(asked: Slo, reason: str) -> None:
    state = fleet(unattainable="refuse")
    state.report(report("a"), 0.0)
    (refused,) = state.admit([ask(asked)], 0.0)
    assert (refused.verdict, refused.retry_after_s, refused.reason) == (Verdict.REFUSED, 0.0, reason)


def test_a_busy_start_is_not_yet_what_is_usual() -> None:
    state = after(measured(1.9, iterations=40))
    idle(state, 2.0, 10 * HALF_LIFE_S)
    assert slope(state) < 1.4


def test_a_busy_replica_keeps_what_was_measured() -> None:
    state = after(measured(20.0))
    for k in range(100):
        state.report(report("a", 10 + k, age_s=0.2), 2.0 + 0.5 * k)
    assert slope(state) == pytest.approx(20.0, rel=0.05)


@pytest.mark.parametrize(
    ("told", "is_slowed"),
    [
        (measured(1.0, more_s=0.03), True),  # the slope alone stays below twice the profile's
        (measured(0.3, noise=2.0), True),  # fast in the mean, and nobody can tell how long the next one takes
        (measured(1.6), False),
        (measured(1.0, noise=0.1), False),
    ],
    ids=["every iteration longer", "erratic", "other hardware", "noise"],
)
def test_a_replica_is_slowed_by_whatever_makes_its_iterations_long_or_unknown(
    told: tuple[Step, ...], is_slowed: bool
) -> None:
    state = after(*[told] * 5)
    assert slope(state) < 2.0
    assert state.replicas["a"].is_slowed == is_slowed


@pytest.mark.parametrize("asked", [Slo(0.001, 0.03, tier="tight"), Slo(0.05, 0.0005, tier="tight")])
def test_a_refusal_for_good_tells_an_objective_that_can_be_had(asked: Slo) -> None:
    state = fleet(unattainable="refuse")
    state.report(report("a"), 0.0)
    (refused,) = state.admit([ask(asked, 3000)], 0.0)
    assert refused.predicted_ttft_s > asked.ttft_s or refused.predicted_tpot_s > asked.tpot_s
    for share, verdict in ((0.9, Verdict.REFUSED), (1.01, Verdict.ADMITTED)):
        told = Slo(share * refused.predicted_ttft_s, 1.05 * refused.predicted_tpot_s, tier="tight")
        assert state.admit([ask(told, 3000)], 0.0)[0].verdict == verdict


def test_a_refusal_for_good_for_want_of_kv_cache_tells_no_time_that_would_do() -> None:
    state = fleet(unattainable="refuse")
    state.report(report("a"), 0.0)
    (refused,) = state.admit([ask(Slo(600.0, 0.1, tier="loose"), 399_900)], 0.0)
    assert (refused.verdict, refused.retry_after_s) == (Verdict.REFUSED, 0.0)
    assert refused.predicted_ttft_s == refused.predicted_tpot_s == float("inf")
