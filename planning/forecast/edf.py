"""What follows once every prefill is done where time is too short for all decodes in every iteration.

An engine that has time for it decodes in lockstep (``planning.forecast.lockstep``). Where it has not,
``planning.batch.slo`` takes the decodes that are due first, in iterations no longer than the tightest pace, and loose
ones take part now and then: earliest deadline first. That keeps every deadline if never more work has fallen due than
there was time for: the demand bound of real-time scheduling (Baruah et al. 1990), over DSLO lines. Work is a fluid
here, which errs upwards.
"""

import math
from typing import NamedTuple

import numpy as np
from numba import float64, njit, types

from planning.engine import ENGINE_TYPE, EngineModel
from planning.forecast.lockstep import DECODES_TYPE
from planning.order import least_of, numbers, order_of
from profiles.compiled_once import compiled_once
from profiles.kernels import LINES, Coefficients, draft_s, kv_read_s, overhead_s, roofline

LEAST_PACE_S = 1e-6
# Iterations whose base time a whole number of them takes beyond what a fluid does: with one, one in twelve tables that
# only this admits is late when it is run; with this, none was found (``tests/oracles/test_edf.py``).
UNEVEN = 1.5

DUE = np.dtype(
    [
        ("first_s", "f8"),  # when the next step of a decode is due; inf: never
        ("last_s", "f8"),  # when its last step is
        ("pace_s", "f8"),  # between two steps
        ("steps", "i8"),
        ("tokens", "f8"),  # computed per step
        ("rest_s", "f8"),  # seconds per step beside those of its tokens
    ]
)


class Sums(NamedTuple):
    """What has fallen due up to some time: numbers in arrays, which a sweep over time changes."""

    at_s: np.ndarray  # f8[1]
    spare_s: np.ndarray  # f8[LINES], time there was less work that was due, by either line of the roofline
    rate: np.ndarray  # f8[LINES], seconds of work that fall due per second
    kv_tokens: np.ndarray  # f8[1], held by all if each token comes when it is due
    kv_rate: np.ndarray  # f8[1], tokens per second
    base_s: np.ndarray  # f8[LINES], of every iteration, however small


@njit(cache=True)
def _fill_due(coef: Coefficients, decode: np.void, start_s: float, due: np.void) -> None:
    """When a decode's steps are due; an end-to-end deadline is spread evenly over them."""
    steps, even_s = decode["steps"], (decode["deadline_s"] - start_s) / decode["steps"]
    first_s, pace_s = min(decode["due_s"], start_s + even_s), decode["pace_s"]
    last_s = first_s
    if steps > 1 and first_s < math.inf:
        last_s = max(first_s, min(first_s + (steps - 1) * pace_s, decode["deadline_s"]))
        pace_s = (last_s - first_s) / (steps - 1)
    due["first_s"], due["last_s"], due["pace_s"], due["steps"] = first_s, last_s, max(pace_s, LEAST_PACE_S), steps
    due["tokens"] = decode["step_tokens"]
    kv_tokens = decode["kv_tokens"] + decode["gain"] * 0.5 * (steps + 1)
    due["rest_s"] = overhead_s(coef, 1.0) + kv_read_s(coef, kv_tokens)


@njit(cache=True)
def _tightest_s(dues: np.ndarray, by_last: np.ndarray, longest_s: float) -> np.ndarray:
    """Tightest pace among ``by_last[k:]`` for every k: how long iterations may be until that one has ended."""
    tightest_s = np.empty(len(dues))
    for k in range(len(dues) - 1, -1, -1):
        longest_s = min(longest_s, dues[by_last[k]]["pace_s"])
        tightest_s[k] = longest_s
    return tightest_s


@njit(cache=True)
def _pass_time(until_s: float, step_s: float, sums: Sums) -> None:
    """Let time pass in iterations of ``step_s``, while work falls due at the present rate."""
    passed_s = max(0.0, until_s - sums.at_s[0])
    for line in range(LINES):
        sums.spare_s[line] += passed_s * (1.0 - sums.base_s[line] / step_s - sums.rate[line])
    sums.kv_tokens[0] += passed_s * sums.kv_rate[0]
    sums.at_s[0] += passed_s


@njit(cache=True)
def _begin(coef: Coefficients, due: np.void, gain: float, sums: Sums) -> None:
    """A decode's first step is due, and more from now on."""
    for line in range(LINES):
        work_s = roofline(coef, line)[0] * due["tokens"] + due["rest_s"]
        sums.spare_s[line] -= work_s
        sums.rate[line] += work_s / due["pace_s"]
    sums.kv_tokens[0] += gain
    sums.kv_rate[0] += gain / due["pace_s"]


@njit(cache=True)
def _end(coef: Coefficients, due: np.void, decode: np.void, sums: Sums) -> None:
    """A decode's last step is due: it leaves."""
    for line in range(LINES):
        sums.rate[line] -= (roofline(coef, line)[0] * due["tokens"] + due["rest_s"]) / due["pace_s"]
    sums.kv_tokens[0] -= decode["kv_tokens"] + decode["gain"] * due["steps"]
    sums.kv_rate[0] -= decode["gain"] / due["pace_s"]


@njit(cache=True)
def _at_start(engine: EngineModel, decodes: np.ndarray, start_s: float) -> Sums:
    """The sums before anything is due."""
    coef, base_s, kv_tokens, drafts = engine.coef, np.empty(LINES), np.zeros(1), 0
    for j in range(len(decodes)):
        kv_tokens[0] += decodes[j]["kv_tokens"]
        drafts = max(drafts, decodes[j]["step_tokens"] - 1)
    for line in range(LINES):
        base_s[line] = roofline(coef, line)[1] + draft_s(coef, drafts)
    return Sums(np.full(1, start_s), -UNEVEN * base_s, np.zeros(LINES), kv_tokens, np.zeros(1), base_s)


@compiled_once(types.UniTuple(float64, 2)(ENGINE_TYPE, DECODES_TYPE, float64))
def run_edf(engine: EngineModel, decodes: np.ndarray, start_s: float) -> tuple[float, float]:
    """Run ``decodes`` (DECODE_STATE[n]) by deadline from ``start_s``; fills margins and finish times in.

    Returns the least margin in seconds, below zero by the work that is late, and the peak of KV tokens held (rounded up
    to blocks for each request) if every token comes when it is due. A decode without objective yields to the others,
    and nothing is forecast of it. O(n log n).
    """
    coef, limits = engine.coef, engine.limits
    count, sums = len(decodes), _at_start(engine, decodes, start_s)
    dues = np.zeros(count, dtype=DUE)
    for j in range(count):
        _fill_due(coef, decodes[j], start_s, dues[j])
    by_first = order_of(numbers(dues["first_s"]))
    by_last = order_of(numbers(dues["last_s"]))
    steps_s = _tightest_s(dues, by_last, limits["max_iteration_s"])
    worst_s, peak_tokens, begun = math.inf, 0.0, 0
    for k in range(count):
        due, decode = dues[by_last[k]], decodes[by_last[k]]
        if due["last_s"] == math.inf:
            decode["margin_s"] = decode["finish_s"] = math.inf
            continue
        while begun < count and dues[by_first[begun]]["first_s"] <= due["last_s"]:
            newcomer = by_first[begun]
            _pass_time(dues[newcomer]["first_s"], steps_s[k], sums)
            _begin(coef, dues[newcomer], decodes[newcomer]["gain"], sums)
            worst_s, begun = min(worst_s, least_of(sums.spare_s)), begun + 1
        _pass_time(due["last_s"], steps_s[k], sums)
        worst_s = min(worst_s, least_of(sums.spare_s))
        peak_tokens = max(peak_tokens, sums.kv_tokens[0] + (count - k) * (limits["block_tokens"] - 1))
        _end(coef, due, decode, sums)
        decode["margin_s"], decode["finish_s"] = worst_s, max(start_s, due["last_s"])
    return worst_s, peak_tokens
