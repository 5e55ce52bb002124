"""Online correction of one replica's profile: slope and intercept apart, by recursive least squares.

A replica takes ``slope * v + intercept`` where ``v`` is the profile's time without its intercept. Every observed
iteration updates a small state vector (state in, observation in, new state out); ``corrected`` turns it into
coefficients for the planner. A Huber weight keeps single stalls from mattering; a streak of outliers on one side is a
machine that changed, and the past is forgotten faster; a ridge keeps what the iterations at hand cannot tell apart at
"everything slower alike"; bounds hold always.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np
from numba import njit

from profiles import kernels
from profiles.batch import Floats
from profiles.online_state import (
    A_II,
    A_SI,
    A_SS,
    ALLOWED,
    BEHIND,
    C_I,
    C_S,
    COUNT,
    DEFAULT,
    ERROR,
    INTERCEPT_S,
    MOST_BEHIND,
    PRIOR,
    RAW_ERROR,
    RELAXING,
    RESIDUALS,
    SCALE,
    SLOPE,
    SPREAD,
    SQUARE,
    STATE,
    STREAK,
    Tuning,
)
from profiles.reach import RUN, follow_run, mean, most_behind, reach
from profiles.residuals import note_residual
from profiles.spread import IterationSpread, draw_ratios

PRIOR_ITERATIONS = 20.0
PRIOR_RUNS = 500  # drawn to see how far behind runs of such a spread fall


class Drift(NamedTuple):
    """Where the correction stands: what changed, and the mean absolute relative errors with and without it."""

    slope: float
    intercept_s: float
    profile_intercept_s: float
    error: float
    uncorrected_error: float
    observations: int
    reach: float  # iterations that a run of ``RUN`` falls behind at most, in 95 % of runs


LEAST_INTERCEPT_S = 1e-3  # unit of the intercept where the profile has none
LEAST_SPREAD = 0.01
HALF_LIFE_S = 60.0  # of what a correction is worse than usual while its replica is idle


def new_correction(coef: Floats, spread: IterationSpread | None = None) -> Floats:
    """The state that leaves ``coef`` as it is; errors and ``reach`` begin as the profile's spread makes them."""
    state = np.zeros(STATE)
    state[SLOPE], state[INTERCEPT_S], state[SPREAD], state[SCALE] = 1.0, kernels.gemm_s(coef, 0.0), 0.1, 1.0
    state[ALLOWED] = math.inf
    if spread is not None and spread.is_known:
        _expect(state, spread)
    return state


def _expect(state: Floats, spread: IterationSpread) -> None:
    """Set the errors, and how far behind runs fall, to those of the kind of batch that strays more."""
    state[SPREAD], state[ERROR], state[SQUARE], behind = _expected(spread)
    state[RAW_ERROR] = state[ERROR]
    state[PRIOR] = PRIOR_ITERATIONS
    state[SCALE] = min(max(behind / float(most_behind(state, DEFAULT)), DEFAULT.least_scale), DEFAULT.most_scale)
    state[ALLOWED] = most_behind(state, DEFAULT)


@functools.lru_cache(maxsize=64)
def _expected(spread: IterationSpread) -> tuple[float, float, float, float]:
    """Mean absolute error over the prediction and over the measured time, mean square of the first, and how far behind
    a run falls at most."""
    found = []
    for ratios in draw_ratios(spread, PRIOR_RUNS, RUN):
        off = ratios / np.median(ratios) - 1.0
        most = np.maximum(np.cumsum(off, axis=1), 0.0).max(axis=1)
        errors = max(LEAST_SPREAD, float(np.abs(off).mean())), max(1e-6, float(np.abs(off / (1.0 + off)).mean()))
        square = float((np.minimum(off, DEFAULT.furthest) ** 2).mean())
        found.append((*errors, square, float(np.quantile(most, DEFAULT.confidence))))
    return max(found, key=lambda each: each[3])


@njit(cache=True)
def observe(
    state: Floats,
    coef: Floats,
    composition: Floats,
    seconds: float,
    tuning: Tuning = DEFAULT,
) -> Floats:
    """The state after one more iteration, which took ``seconds``; ``coef`` is the uncorrected profile.

    ``composition`` (f8[5]) are the last five arguments of ``kernels.iteration_s``.

    Empty batches and times that are not positive and finite leave the state unchanged.
    """
    new = state.copy()
    base_s = kernels.gemm_s(coef, 0.0)
    model_s = kernels.iteration_s(coef, composition[0], composition[1], composition[2], composition[3], composition[4])
    if not (model_s > 0.0 and 0.0 < seconds < np.inf):
        return new
    unit_s = max(base_s, LEAST_INTERCEPT_S)
    slope_part, intercept_part, ratio = (model_s - base_s) / model_s, unit_s / model_s, seconds / model_s
    expected = state[SLOPE] * slope_part + state[INTERCEPT_S] / model_s
    error = abs(ratio - expected)
    limit = tuning.outlier_spreads * state[SPREAD]
    new[STREAK] = _streak(state[STREAK], ratio - expected, limit)
    changed = abs(new[STREAK]) >= tuning.patience
    weight = 1.0 if changed or error <= limit else limit / error
    forgetting = tuning.forgetting_on_change if changed else tuning.forgetting
    _accumulate(new, slope_part, intercept_part, ratio, weight, forgetting)
    _solve(new, base_s, unit_s, tuning)
    new[SPREAD] = max(LEAST_SPREAD, mean(state[SPREAD], min(error, 5.0 * state[SPREAD]), tuning.averaging))
    rate = max(tuning.averaging, 1.0 / (1.0 + state[COUNT] + state[PRIOR]))
    new[ERROR] = mean(state[ERROR], min(1.0, error / ratio), rate)  # a stall shortens what is measured after it
    new[RAW_ERROR] = mean(state[RAW_ERROR], min(1.0, abs(ratio - 1.0) / ratio), rate)
    new[COUNT] = state[COUNT] + 1
    follow_run(new, (ratio - expected) / max(expected, tuning.lowest), tuning)
    note_residual(new[RESIDUALS:], composition[2] > 0.0, ratio / max(expected, tuning.lowest))
    return new


@njit(cache=True)
def observe_steps(state: Floats, coef: Floats, steps: Floats, tuning: Tuning = DEFAULT) -> Floats:
    """``observe`` for each row of float64[n, 6]: the five terms of a batch and its seconds."""
    for i in range(len(steps)):
        state = observe(state, coef, steps[i, :5], steps[i, 5], tuning)
    return state


@njit(cache=True)
def _streak(streak: float, signed_error: float, limit: float) -> float:
    """Outliers in a row on one side, counted with their sign; 0 after an inlier."""
    if abs(signed_error) <= limit:
        return 0.0
    side = 1.0 if signed_error > 0 else -1.0
    return streak + side if streak * side > 0 else side


@njit(cache=True)
def _accumulate(
    new: Floats, slope_part: float, intercept_part: float, ratio: float, weight: float, forgetting: float
) -> None:
    """Fade the normal equations and add one weighted observation."""
    for position in (A_SS, A_SI, A_II, C_S, C_I):
        new[position] *= forgetting
    new[A_SS] += weight * slope_part * slope_part
    new[A_SI] += weight * slope_part * intercept_part
    new[A_II] += weight * intercept_part * intercept_part
    new[C_S] += weight * slope_part * ratio
    new[C_I] += weight * intercept_part * ratio


@njit(cache=True)
def _solve(new: Floats, base_s: float, unit_s: float, tuning: Tuning) -> None:
    """Slope and intercept from the regularised 2x2 normal equations, within bounds (the other re-solved at one)."""
    prior = base_s / unit_s
    a_ss = new[A_SS] + tuning.prior_weight + tuning.contrast_weight
    a_ii = new[A_II] + tuning.prior_weight + tuning.contrast_weight
    a_si = new[A_SI] - tuning.contrast_weight
    c_s = new[C_S] + tuning.prior_weight + tuning.contrast_weight * (1.0 - prior)
    c_i = new[C_I] + tuning.prior_weight * prior - tuning.contrast_weight * (1.0 - prior)
    slope = (c_s * a_ii - c_i * a_si) / (a_ss * a_ii - a_si * a_si)
    slope = min(max(slope, tuning.lowest), tuning.highest)
    intercept = (c_i - a_si * slope) / a_ii
    bounded = min(max(intercept, tuning.lowest * prior), tuning.highest)
    if bounded != intercept:
        slope = min(max((c_s - a_si * bounded) / a_ss, tuning.lowest), tuning.highest)
    new[SLOPE], new[INTERCEPT_S] = slope, bounded * unit_s


@njit(cache=True)
def corrected(coef: Floats, state: Floats) -> Floats:
    """Coefficients of the machine as observed: slopes scaled, the intercept replaced, the kink left where it is.

    The line that does not rule small batches may get a negative ``b``; the maximum of both never does.
    """
    base_s = kernels.gemm_s(coef, 0.0)
    new: Floats = coef * state[SLOPE]
    for position in (kernels.B_1, kernels.B_2):
        new[position] = state[SLOPE] * (coef[position] - base_s) + state[INTERCEPT_S]
    return new


@njit(cache=True)
def follow_steps(state: Floats, coef: Floats, steps: Floats) -> tuple[Floats, Floats, float]:
    """``observe_steps``, the coefficients ``corrected`` by that, and its ``reach``, in one call."""
    state = observe_steps(state, coef, steps)
    return state, corrected(coef, state), reach(state)


@njit(cache=True)
def learn_usual(usual: Floats, state: Floats, most: Floats, weight: float) -> None:
    """Move what is ``usual`` (f8[RELAXING], in place) towards the state, which counts for ``most`` at most."""
    for i, position in enumerate(RELAXING):
        usual[i] += weight * (min(state[position], most[i]) - usual[i])


@njit(cache=True)
def relaxed(state: Floats, coef: Floats, usual: Floats, idle_s: float) -> Floats:
    """The state after ``idle_s`` without an iteration: half of what it is worse than ``usual`` (f8[RELAXING]) is
    forgotten every ``HALF_LIFE_S``.

    What made iterations slow or erratic may have passed meanwhile, and a replica that looks too slow for any request
    gets none by which it could be seen. Nobody needs to forget that a replica is fast: it gets requests.
    """
    new, kept, unit_s = state.copy(), 0.5 ** (idle_s / HALF_LIFE_S), max(kernels.gemm_s(coef, 0.0), LEAST_INTERCEPT_S)
    for i, position in enumerate(RELAXING):
        if state[position] > usual[i]:
            new[position] = usual[i] + kept * (state[position] - usual[i])
    for position in (A_SS, A_SI, A_II):
        new[position] *= kept
    intercept = new[INTERCEPT_S] / unit_s
    new[C_S] = new[A_SS] * new[SLOPE] + new[A_SI] * intercept  # as if these observations had said so
    new[C_I] = new[A_SI] * new[SLOPE] + new[A_II] * intercept
    new[BEHIND], new[MOST_BEHIND], new[STREAK] = kept * state[BEHIND], kept * state[MOST_BEHIND], 0.0
    return new


def drift(state: Floats, coef: Floats) -> Drift:
    """How far the replica is from its profile ``coef``, for reports and alerts."""
    return Drift(
        slope=float(state[SLOPE]),
        intercept_s=float(state[INTERCEPT_S]),
        profile_intercept_s=float(kernels.gemm_s(coef, 0.0)),
        error=float(state[ERROR]),
        uncorrected_error=float(state[RAW_ERROR]),
        observations=int(state[COUNT]),
        reach=float(reach(state)),
    )
