"""What follows once every prefill is done: decodes in lockstep until each reaches its predicted length, in closed form.

Every iteration then carries every decode still alive. Between two departures the iteration time grows linearly with
the KV tokens, so the end of the k-th iteration is a convex quadratic in k, and a DSLO line can only be crossed first at
an end of such a segment: checking the ends is exact (SLOs-Serve section 3.2.1, with KV growth and departures).
"""

import math

import numpy as np
from numba import float64, from_dtype, int64, njit, types

from planning.deadlines import dslo_due_s, remaining_tokens
from planning.order import integers, order_of_integers
from profiles.compiled_once import compiled_once
from profiles.kernels import Coefficients, iteration_s, kv_read_s

DECODE_STATE = np.dtype(
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
DECODES_TYPE = from_dtype(DECODE_STATE)[::1]
SPAN = np.dtype([("step", "i8"), ("end_s", "f8")])  # an iteration, counted from 1, and when it ends


@njit(cache=True)
def accepted_tokens(draft_tokens: int, acceptance: float) -> float:
    """Expected tokens of one decode step with ``draft_tokens`` drafts: ``1 + a + ... + a**draft`` (appendix D)."""
    gain, chance = 1.0, 1.0
    for _ in range(draft_tokens):
        chance *= acceptance
        gain += chance
    return gain


@njit(cache=True)
def fill_decode_state(decode: np.void, row: np.void, now_s: float, acceptance: float) -> None:
    """Describe one decoding request as a ``DECODE_STATE`` record."""
    gain = accepted_tokens(row["spec_tokens"], acceptance)
    decode["steps"] = math.ceil(remaining_tokens(row) / gain - 1e-9)
    decode["step_tokens"] = 1 + row["spec_tokens"]
    decode["gain"] = gain
    decode["kv_tokens"] = row["computed_tokens"]
    decode["due_s"] = dslo_due_s(row, now_s)
    decode["pace_s"] = row["tpot_s"] * gain
    decode["deadline_s"] = row["deadline_s"]


@njit(cache=True)
def _margin_s(decode: np.void, spans: np.ndarray, longest_s: float) -> float:
    """Least time to spare of one decode over ``spans``, whose longest iteration takes ``longest_s``.

    A decode whose pace no iteration exceeds is never tighter than at its first token.
    """
    margin_s = min(decode["due_s"] - spans[0]["end_s"], decode["deadline_s"] - decode["finish_s"])
    if decode["due_s"] == math.inf or decode["pace_s"] >= longest_s:
        return margin_s
    for j in range(1, len(spans)):
        if spans[j]["step"] > decode["steps"]:
            break
        due_s = decode["due_s"] + (spans[j]["step"] - 1) * decode["pace_s"]
        margin_s = min(margin_s, due_s - spans[j]["end_s"])
    return margin_s


@njit(cache=True)
def _most_drafts(decodes: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Draft tokens of the deepest speculation among ``order[i:]``, for every i."""
    drafts = np.zeros(len(order), dtype=np.int64)
    deepest = 0
    for i in range(len(order) - 1, -1, -1):
        deepest = max(deepest, decodes[order[i]]["step_tokens"] - 1)
        drafts[i] = deepest
    return drafts


@njit(cache=True)
def _walk(
    coef: Coefficients, decodes: np.ndarray, start_s: float, block_tokens: int, spans: np.ndarray
) -> tuple[int, float, float]:
    """Fill ``spans`` with the end of the first iteration and of each stretch between departures, and finish times.

    Returns the number of spans, the longest iteration and the peak of KV tokens.
    """
    tokens, kv_tokens, growth = 0.0, 0.0, 0.0
    for i in range(len(decodes)):
        tokens += decodes[i]["step_tokens"]
        kv_tokens += decodes[i]["kv_tokens"]
        growth += decodes[i]["gain"]
    order = order_of_integers(integers(decodes["steps"]))
    drafts = _most_drafts(decodes, order)
    count, done, now_s, longest_s, peak_tokens = 0, 0, start_s, 0.0, 0.0
    for i in range(len(order)):
        decode = decodes[order[i]]
        steps = decode["steps"] - done
        if steps > 0:
            alive = len(order) - i
            first_s = iteration_s(coef, tokens, kv_tokens + growth * done + tokens, 0.0, alive, drafts[i])
            if count == 0:
                spans[0]["step"], spans[0]["end_s"], count = 1, start_s + first_s, 1
            now_s += steps * first_s + kv_read_s(coef, growth) * steps * (steps - 1) / 2
            done += steps
            spans[count]["step"], spans[count]["end_s"], count = done, now_s, count + 1
            longest_s = max(longest_s, first_s + kv_read_s(coef, growth) * (steps - 1))
            peak_tokens = max(peak_tokens, kv_tokens + growth * done + alive * (block_tokens - 1))
        decode["finish_s"] = now_s
        tokens -= decode["step_tokens"]
        kv_tokens -= decode["kv_tokens"]
        growth -= decode["gain"]
    return count, longest_s, peak_tokens


@compiled_once(types.UniTuple(float64, 3)(float64[::1], DECODES_TYPE, float64, int64))
def run_lockstep(
    coef: Coefficients, decodes: np.ndarray, start_s: float, block_tokens: int
) -> tuple[float, float, float]:
    """Run ``decodes`` (DECODE_STATE[n]) in lockstep from ``start_s``; fills margins and finish times in.

    Returns the least margin in seconds, the peak of KV tokens held (rounded up to blocks for each request) and the end
    of the first iteration. O(n log n) where the paces hold, O(n**2) where earned slack is used up.
    """
    if len(decodes) == 0:
        return math.inf, 0.0, start_s
    spans = np.zeros(len(decodes) + 1, dtype=SPAN)
    count, longest_s, peak_tokens = _walk(coef, decodes, start_s, block_tokens, spans)
    worst_s = math.inf
    for i in range(len(decodes)):
        decodes[i]["margin_s"] = _margin_s(decodes[i], spans[:count], longest_s)
        worst_s = min(worst_s, decodes[i]["margin_s"])
    return worst_s, peak_tokens, spans[0]["end_s"]
