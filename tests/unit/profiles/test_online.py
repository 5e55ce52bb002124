"""A replica that differs from its profile is learnt: slope and intercept apart, fast, and not from single stalls."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiles import kernels
from profiles.batch import Floats
from profiles.online import (
    HALF_LIFE_S,
    PRIOR_ITERATIONS,
    corrected,
    drift,
    new_correction,
    observe,
    observe_steps,
    relaxed,
)
from profiles.online_state import DEFAULT, ERROR, INTERCEPT_S, RELAXING, SCALE, SLOPE
from profiles.reach import RUN, reach
from profiles.spread import IterationSpread, RatioQuantiles, stray_factor
from tests.support.planted_profile import COEFFICIENTS, lognormal

BASE_S = float(kernels.gemm_s(COEFFICIENTS, 0.0))


def machine(slope: float, intercept: float, steps: int, *, noise: float = 0.02, seed: int = 0) -> Floats:
    """Iterations of a machine ``slope`` times the profile's variable part plus ``intercept`` times its intercept."""
    random, rows = np.random.default_rng(seed), np.zeros((steps, 6))
    for row in rows:
        decodes = random.integers(1, 200)
        chunk = random.integers(64, 2048) if random.random() < 0.5 else 0
        row[:5] = decodes + chunk, 500 * decodes, chunk * chunk / 2, decodes + (chunk > 0), 0
        exact_s = slope * (kernels.iteration_s(COEFFICIENTS, *row[:5]) - BASE_S) + intercept * BASE_S
        row[5] = exact_s * (1 + noise * random.standard_normal())
    return rows


def learn(rows: Floats, state: Floats | None = None) -> Floats:
    return observe_steps(new_correction(COEFFICIENTS) if state is None else state, COEFFICIENTS, rows)


@pytest.mark.parametrize(("slope", "intercept"), [(1, 1), (2, 1), (1, 3), (0.6, 1.5), (4, 4)])
def test_slope_and_intercept_are_told_apart(slope: float, intercept: float) -> None:
    state = learn(machine(slope, intercept, 200))
    assert state[SLOPE] == pytest.approx(slope, rel=0.08)
    assert state[INTERCEPT_S] == pytest.approx(intercept * BASE_S, rel=0.08)


def test_corrected_coefficients_predict_the_other_machine() -> None:
    state, unseen = learn(machine(2.5, 1.4, 200)), machine(2.5, 1.4, 100, noise=0, seed=9)
    coef = corrected(COEFFICIENTS, state)
    errors = [abs(kernels.iteration_s(coef, *row[:5]) / row[5] - 1) for row in unseen]
    assert max(errors) < 0.05


def test_correction_keeps_the_kink_where_it_was_measured() -> None:
    def kink(coef: Floats) -> float:
        return (coef[kernels.B_1] - coef[kernels.B_2]) / (coef[kernels.K1_2] - coef[kernels.K1_1])

    assert kink(corrected(COEFFICIENTS, learn(machine(2, 3, 100)))) == pytest.approx(kink(COEFFICIENTS))


def test_a_new_correction_changes_nothing() -> None:
    assert corrected(COEFFICIENTS, new_correction(COEFFICIENTS)) == pytest.approx(COEFFICIENTS)


def test_iterations_all_alike_are_predicted_well_though_nothing_tells_the_two_apart() -> None:
    row = np.array([64, 32000, 0, 64, 0, 0.0])
    row[5] = 2 * kernels.iteration_s(COEFFICIENTS, *row[:5])
    state = learn(np.tile(row, (300, 1)))
    assert kernels.iteration_s(corrected(COEFFICIENTS, state), *row[:5]) == pytest.approx(row[5], rel=0.01)
    assert state[SLOPE] == pytest.approx(2, rel=0.05)
    assert state[INTERCEPT_S] == pytest.approx(2 * BASE_S, rel=0.05)


def test_a_single_stall_hardly_matters() -> None:
    state = learn(machine(1, 1, 100))
    stall = machine(1, 1, 1, seed=5)
    stall[0, 5] *= 50
    after = learn(stall, state)
    assert after[SLOPE] == pytest.approx(state[SLOPE], rel=0.05)
    assert after[INTERCEPT_S] == pytest.approx(state[INTERCEPT_S], rel=0.1)


def test_what_a_stall_shortens_is_a_bounded_error() -> None:
    """Where steps run ahead, a host's pause makes one step long and the next, measured from its end, short."""
    state = learn(machine(1, 1, 100))
    short = machine(1, 1, 1, seed=5)
    short[0, 5] *= 0.01
    assert learn(short, state)[ERROR] - state[ERROR] <= DEFAULT.averaging


def test_rare_stalls_do_not_bias_the_correction() -> None:
    rows = machine(1, 1, 400)
    rows[::25, 5] *= 20
    state = learn(rows)
    assert state[SLOPE] == pytest.approx(1, rel=0.1)
    assert state[INTERCEPT_S] == pytest.approx(BASE_S, rel=0.1)


def test_a_machine_that_changes_is_followed_within_thirty_iterations() -> None:
    state = learn(machine(2, 2, 30, seed=3), learn(machine(1, 1, 300)))
    predicted, actual = corrected(COEFFICIENTS, state), machine(2, 2, 50, noise=0, seed=4)
    assert all(kernels.iteration_s(predicted, *row[:5]) == pytest.approx(row[5], rel=0.1) for row in actual)


@given(st.lists(st.tuples(st.floats(1, 4096), st.floats(0, 1e6), st.floats(0, 1e8), st.floats(1e-6, 1e3)), max_size=60))
def test_bounds_hold_whatever_is_observed(steps: list[tuple[float, float, float, float]]) -> None:
    state = new_correction(COEFFICIENTS)
    for tokens, kv_tokens, pairs, seconds in steps:
        state = observe(state, COEFFICIENTS, np.array([tokens, kv_tokens, pairs, 1.0, 0.0]), seconds)
    assert DEFAULT.lowest <= state[SLOPE] <= DEFAULT.highest
    assert DEFAULT.lowest * BASE_S * (1 - 1e-9) <= state[INTERCEPT_S] <= DEFAULT.highest * BASE_S * (1 + 1e-9)
    coef = corrected(COEFFICIENTS, state)
    slopes = [kernels.K1_1, kernels.K1_2, kernels.K_KV, kernels.K_ATT, kernels.K_SEQ, kernels.K_SPEC]
    assert (coef[slopes] >= 0).all()
    assert kernels.gemm_s(coef, 0.0) > 0


@pytest.mark.parametrize("seconds", [0.0, -1.0, np.nan, np.inf])
def test_times_that_are_no_times_and_empty_batches_teach_nothing(seconds: float) -> None:
    state = learn(machine(2, 1, 20))
    assert (observe(state, COEFFICIENTS, np.array([64.0, 1000.0, 0.0, 64.0, 0.0]), seconds) == state).all()
    assert (observe(state, COEFFICIENTS, np.array([0.0, 0.0, 0.0, 0.0, 0.0]), 0.01) == state).all()


def test_observing_leaves_the_old_state_alone() -> None:
    state = learn(machine(2, 1, 20))
    before = state.copy()
    observe(state, COEFFICIENTS, np.array([64.0, 1000.0, 0.0, 64.0, 0.0]), 0.1)
    assert (state == before).all()


def test_a_profile_without_intercept_can_gain_one() -> None:
    coef = COEFFICIENTS.copy()
    coef[[kernels.B_1, kernels.B_2]] = 0
    rows = machine(1, 0, 300, noise=0)
    for row in rows:
        row[5] = kernels.iteration_s(coef, *row[:5]) + 4e-3
    state = observe_steps(new_correction(coef), coef, rows)
    assert state[INTERCEPT_S] == pytest.approx(4e-3, rel=0.1)


def test_drift_reports_what_changed_and_what_the_correction_is_worth() -> None:
    report = drift(learn(machine(2, 1, 200)), COEFFICIENTS)
    assert report.slope == pytest.approx(2, rel=0.08)
    assert report.profile_intercept_s == BASE_S
    assert report.observations == 200
    assert report.error < 0.06 < 0.2 < report.uncorrected_error


def runs_within_reach(sigma: float, correlation: float) -> float:
    """Share of runs, of those after the first ten, that fall behind by no more than the reach known when they began."""
    random, state, deviation, within = np.random.default_rng(1), new_correction(COEFFICIENTS), 0.0, []
    row = np.array([64, 32000, 0, 64, 0, 0.0])
    model_s = kernels.iteration_s(COEFFICIENTS, *row[:5])
    for run in range(250):
        known, behind, most = reach(state), 0.0, 0.0
        for _ in range(RUN):
            deviation = correlation * deviation + np.sqrt(1 - correlation**2) * random.standard_normal()
            row[5] = model_s * np.exp(sigma * deviation - sigma**2 / 2)
            behind += row[5] / kernels.iteration_s(corrected(COEFFICIENTS, state), *row[:5]) - 1
            most = max(most, behind)
            state = observe(state, COEFFICIENTS, row[:5], row[5])
        if run >= 10:
            within.append(most <= known)
    return float(np.mean(within))


@pytest.mark.parametrize(("sigma", "correlation"), [(0.1, 0.0), (0.2, 0.0), (0.1, 0.9), (0.2, 0.5)])
def test_as_many_runs_as_asked_stay_within_the_reach_however_errors_hang_together(
    sigma: float, correlation: float
) -> None:
    assert runs_within_reach(sigma, correlation) == pytest.approx(DEFAULT.confidence, abs=0.05)


def test_the_reach_of_exact_predictions_is_nothing_and_that_of_useless_ones_is_bounded() -> None:
    exact, useless = learn(machine(1, 1, 200, noise=0)), learn(machine(1, 1, 400, noise=0.9, seed=3))
    assert reach(exact) == pytest.approx(0.0, abs=0.05)
    assert reach(useless) <= DEFAULT.furthest


def test_an_engine_that_strayed_far_and_is_calm_again_is_trusted_again() -> None:
    """The scale does not run up against the bound of what is told."""
    random, rows = np.random.default_rng(1), machine(1, 1, 4000, noise=0.0, seed=1)
    rows[:3000, 5] *= np.exp(0.8 * random.standard_normal(3000))
    state = learn(rows[:3000])
    assert reach(state) == DEFAULT.furthest
    assert state[SCALE] < 3.0
    assert reach(learn(rows[3000:], state)) < 0.5 * DEFAULT.furthest


STALLS = IterationSpread(lognormal(0.02), RatioQuantiles(1000, (0.95, 0.98, 1.0, 1.02, 1.06, 2.0)))


@pytest.mark.parametrize("spread", [IterationSpread(lognormal(0.1), lognormal(0.2)), STALLS], ids=["noise", "stalls"])
def test_as_many_runs_as_asked_stay_within_the_reach_that_the_profile_s_spread_gives(spread: IterationSpread) -> None:
    known, random, within = reach(new_correction(COEFFICIENTS, spread)), np.random.default_rng(7), []
    logs = spread.logs()[1]
    for _ in range(1000):
        ratios = np.array([stray_factor(logs, deviate) for deviate in random.standard_normal(RUN)])
        within.append(np.cumsum(ratios - 1.0).max() <= known)
    assert np.mean(within) == pytest.approx(DEFAULT.confidence, abs=0.03)


def test_what_is_measured_overrules_the_spread_within_a_few_times_its_weight() -> None:
    spread = IterationSpread(lognormal(0.3), lognormal(0.3))
    state = new_correction(COEFFICIENTS, spread)
    assert state[ERROR] == pytest.approx(0.3 * np.sqrt(2 / np.pi), rel=0.1)
    one = learn(machine(1, 1, 1, noise=0), state)
    assert one[ERROR] > 0.9 * state[ERROR]
    assert learn(machine(1, 1, int(5 * PRIOR_ITERATIONS), noise=0), state)[ERROR] < 0.01 * state[ERROR] + 0.01


def test_a_spread_changes_no_coefficient_and_one_without_quantiles_changes_nothing() -> None:
    state = new_correction(COEFFICIENTS, STALLS)
    assert corrected(COEFFICIENTS, state) == pytest.approx(COEFFICIENTS)
    np.testing.assert_array_equal(new_correction(COEFFICIENTS, IterationSpread()), new_correction(COEFFICIENTS))


FRESH = new_correction(COEFFICIENTS)
USUAL = FRESH[list(RELAXING)]


def after_idleness(state: Floats, half_lives: float, usual: Floats = USUAL) -> Floats:
    return relaxed(state, COEFFICIENTS, usual, half_lives * HALF_LIFE_S)


def test_what_is_worse_than_usual_is_forgotten_by_half_in_each_half_life_of_idleness() -> None:
    slow = learn(machine(15.0, 15.0, 100, noise=0.5))
    once, twice = after_idleness(slow, 1.0), after_idleness(slow, 2.0)
    for position, usual in zip(RELAXING, USUAL, strict=True):
        worse = max(0.0, slow[position] - usual)
        assert max(0.0, once[position] - usual) == pytest.approx(worse / 2)
        assert max(0.0, twice[position] - usual) == pytest.approx(worse / 4)
    assert (slow[[SLOPE, INTERCEPT_S, ERROR]] > FRESH[[SLOPE, INTERCEPT_S, ERROR]]).all()
    assert after_idleness(once, 1.0) == pytest.approx(twice)
    assert after_idleness(FRESH, 100.0) == pytest.approx(FRESH), "nothing was corrected"


def test_a_fast_machine_stays_known_as_that_and_a_slow_one_as_what_is_usual_of_it() -> None:
    fast = learn(machine(0.5, 0.5, 100))
    assert after_idleness(fast, 100.0)[[SLOPE, INTERCEPT_S]] == pytest.approx(fast[[SLOPE, INTERCEPT_S]])
    stalled, usual = learn(machine(15.0, 15.0, 100)), USUAL * [1.6, 1.6, 1.0, 1.0, 1.0, 1.0]
    assert after_idleness(stalled, 100.0, usual)[[SLOPE, INTERCEPT_S]] == pytest.approx(usual[:2])


def test_what_is_measured_after_idleness_counts_the_more_the_longer_it_was() -> None:
    slow, well = learn(machine(15.0, 15.0, 100)), machine(1.0, 1.0, 2)
    found = [learn(well, after_idleness(slow, half_lives))[SLOPE] for half_lives in (0.0, 2.0, 10.0)]
    assert found[0] > 5.0 > found[1] > found[2]
    assert found[2] == pytest.approx(1.0, abs=0.1)


def test_a_machine_that_is_slow_for_good_is_known_again_after_some_iterations() -> None:
    slow = after_idleness(learn(machine(3.0, 3.0, 100)), 2.0)
    assert slow[SLOPE] == pytest.approx(1.5, rel=0.1)
    assert learn(machine(3.0, 3.0, 20), slow)[SLOPE] == pytest.approx(3.0, rel=0.15)
