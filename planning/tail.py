"""What follows once every prefill is done: decodes in lockstep until each reaches its predicted length, in closed form.

Every iteration then carries every decode still alive. Between two departures the iteration time grows linearly with
the KV tokens, so the end of the k-th iteration is a convex quadratic in k, and a DSLO line can only be crossed first at
an end of such a segment: checking the ends is exact (SLOs-Serve section 3.2.1, with KV growth and departures).
"""

import math

import numpy as np
from numba import njit

from planning.deadlines import line_due_s, remaining_tokens
from profiles.kernels import K_KV, iteration_s

TAIL = np.dtype(
    [
        ("steps", "i8"),  # decode iterations left
        ("step_tokens", "i8"),  # tokens computed per iteration, drafts included
        ("gain", "f8"),  # tokens emitted per iteration
        ("kv_tokens", "f8"),
        ("due_s", "f8"),  # DSLO of the next token
        ("pace_s", "f8"),  # by which that moves per iteration
        ("deadline_s", "f8"),
        ("margin_s", "f8"),  # result: least time to spare over all tokens
        ("finish_s", "f8"),  # result: when the last token comes
    ]
)


@njit(cache=True)
def accepted_tokens(draft_tokens: int, acceptance: float) -> float:
    """Expected tokens of one decode step with ``draft_tokens`` drafts: ``1 + a + ... + a**draft`` (appendix D)."""
    gain, chance = 1.0, 1.0
    for _ in range(draft_tokens):
        chance *= acceptance
        gain += chance
    return gain


@njit(cache=True)
def fill_tail(tail: np.void, row: np.void, now_s: float, acceptance: float) -> None:
    """Describe one decoding request as a line of the tail."""
    gain = accepted_tokens(row["spec_tokens"], acceptance)
    tail["steps"] = math.ceil(remaining_tokens(row) / gain - 1e-9)
    tail["step_tokens"] = 1 + row["spec_tokens"]
    tail["gain"] = gain
    tail["kv_tokens"] = row["computed_tokens"]
    tail["due_s"] = line_due_s(row, now_s)
    tail["pace_s"] = row["tpot_s"] * gain
    tail["deadline_s"] = row["deadline_s"]
    tail["margin_s"] = math.inf


@njit(cache=True)
def _check(tails: np.ndarray, alive: np.ndarray, step: int, end_s: float) -> None:
    """Lower the margins of the ``alive`` decodes by iteration ``step`` (from 1), which ends at ``end_s``."""
    for place in alive:
        tail = tails[place]
        due_s = tail["due_s"]
        if step > 1:
            due_s += (step - 1) * tail["pace_s"]
        tail["margin_s"] = min(tail["margin_s"], due_s - end_s)


@njit(cache=True)
def _most_drafts(tails: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Draft tokens of the deepest speculation among ``order[i:]``, for every i."""
    drafts = np.zeros(len(order), dtype=np.int64)
    deepest = 0
    for i in range(len(order) - 1, -1, -1):
        deepest = max(deepest, tails[order[i]]["step_tokens"] - 1)
        drafts[i] = deepest
    return drafts


@njit(cache=True)
def walk_tail(coef: np.ndarray, tails: np.ndarray, start_s: float, block_tokens: int) -> tuple[float, float, float]:
    """Run ``tails`` in lockstep from ``start_s``; fills margins and finish times in.

    Returns the least margin in seconds, the peak of KV tokens held (rounded up to blocks for each request) and the end
    of the first iteration.
    """
    steps = np.empty(len(tails), dtype=np.int64)
    tokens, kv_tokens, growth = 0.0, 0.0, 0.0
    for i in range(len(tails)):
        steps[i] = tails[i]["steps"]
        tokens += tails[i]["step_tokens"]
        kv_tokens += tails[i]["kv_tokens"]
        growth += tails[i]["gain"]
    order = np.argsort(steps, kind="mergesort")
    drafts = _most_drafts(tails, order)
    done, now_s, end_s, worst_s, peak_tokens = 0, start_s, start_s, math.inf, 0.0
    for i in range(len(order)):
        tail = tails[order[i]]
        count = tail["steps"] - done
        if count > 0:
            alive = len(order) - i
            first_s = iteration_s(coef, tokens, kv_tokens + growth * done + tokens, 0.0, alive, drafts[i])
            if done == 0:
                end_s = now_s + first_s
                _check(tails, order, 1, end_s)
            now_s += count * first_s + coef[K_KV] * growth * count * (count - 1) / 2
            done += count
            _check(tails, order[i:], done, now_s)
            peak_tokens = max(peak_tokens, kv_tokens + growth * done + alive * (block_tokens - 1))
        tail["finish_s"] = now_s
        tail["margin_s"] = min(tail["margin_s"], tail["deadline_s"] - now_s)
        worst_s = min(worst_s, tail["margin_s"])
        tokens -= tail["step_tokens"]
        kv_tokens -= tail["kv_tokens"]
        growth -= tail["gain"]
    return worst_s, peak_tokens, end_s
