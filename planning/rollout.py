"""A replica's future by its own rules: batches formed one after the other on a copy of its table."""

import math

import numpy as np
from numba import njit

from planning.batch import form_batch
from planning.deadlines import line_due_s, next_due_s, remaining_tokens, todo_tokens
from planning.paced import pace_tail
from planning.room import (
    IDLE,
    LATE_DECODE,
    LATE_PREFILL,
    PREEMPT,
    SPARE_DECODE,
    SPARE_PREFILL,
    decode_s,
    is_decode,
    kind_of,
    prefill_s,
)
from planning.tail import TAIL, accepted_tokens, fill_tail, walk_tail

TOLERANCE_S = 1e-9  # lateness that is rounding
MAX_STEPS = 20_000  # iterations of one rollout; a backlog longer than that is unattainable for every purpose

# What a rollout foretells of a request.
OUTLOOK = np.dtype(
    [
        ("first_s", "f8"),  # when its next first token comes (a running decode: its next token); inf: not foreseen
        ("finish_s", "f8"),  # when its last predicted token comes
        ("tpot_s", "f8"),  # mean pace between the two
        ("margin_s", "f8"),  # least time to spare over all tokens and the deadline; inf without objective
        ("doomed", "?"),  # set by the caller: will miss whatever is decided now, so its margin counts for nothing
    ]
)


@njit(cache=True)
def emitted_after(emitted_tokens: int, gain: float) -> int:
    """Tokens emitted after one more decode step of ``gain`` expected tokens, whole and without drift."""
    if gain <= 1.0:
        return emitted_tokens + 1
    return int((math.ceil(emitted_tokens / gain - 1e-9) + 1) * gain + 1e-9)


@njit(cache=True)
def leave(row: np.void) -> None:
    """Mark a request as gone: nothing to do, nothing held."""
    row["running"] = False
    row["computed_tokens"] = row["prompt_tokens"] + row["emitted_tokens"]


@njit(cache=True)
def run_tokens(row: np.void, tokens: int, acceptance: float, departs: bool) -> bool:
    """Move the request on by ``tokens`` of an iteration; True when that emits.

    At its predicted length it leaves if it ``departs``; otherwise the prediction grows up to ``output_cap_tokens``.
    """
    if tokens == PREEMPT:
        row["running"] = False
        row["computed_tokens"] = 0
        return False
    emitted = row["emitted_tokens"] + 1
    if is_decode(row) and row["spec_tokens"] > 0:
        emitted = emitted_after(row["emitted_tokens"], accepted_tokens(row["spec_tokens"], acceptance))
    elif tokens < todo_tokens(row):
        row["running"] = True
        row["computed_tokens"] += tokens
        return False
    limit = row["output_tokens"] if departs else row["output_cap_tokens"]
    row["running"] = True
    row["emitted_tokens"] = min(emitted, max(limit, row["emitted_tokens"] + 1))
    row["computed_tokens"] = row["prompt_tokens"] + row["emitted_tokens"] - 1
    if row["emitted_tokens"] >= limit:
        leave(row)
    elif row["emitted_tokens"] >= row["output_tokens"]:
        row["output_tokens"] = row["emitted_tokens"] + 1
    return True


@njit(cache=True)
def advance(
    coef: np.ndarray, table: np.ndarray, free_at_s: float, until_s: float, limits: np.void, departs: bool = False
) -> float:
    """Run on ``table`` (in place) each iteration that starts before ``until_s``; returns when the engine is next free.

    ``free_at_s`` is when it is free now. The last iteration run is the one in flight at ``until_s``: its batch was
    fixed when it started, so the table is left as it will be at its end, which is the time returned. An idle engine is
    free at ``until_s``.
    """
    tokens = np.zeros(len(table), dtype=np.int32)
    while free_at_s < until_s:
        seconds, _mix = form_batch(coef, table, free_at_s, limits, tokens)
        if seconds <= 0.0:
            return until_s
        free_at_s += seconds
        for i in range(len(table)):
            if tokens[i] != 0:
                run_tokens(table[i], tokens[i], limits["acceptance"], departs)
    return free_at_s


@njit(cache=True)
def _emit(row: np.void, outlook: np.void, due_s: float, end_s: float) -> None:
    """Record that the request emits at ``end_s`` what was due at ``due_s``."""
    if outlook["first_s"] == math.inf:
        outlook["first_s"] = end_s
    outlook["margin_s"] = min(outlook["margin_s"], due_s - end_s)
    if todo_tokens(row) <= 0:
        outlook["finish_s"] = end_s
        outlook["margin_s"] = min(outlook["margin_s"], row["deadline_s"] - end_s)


@njit(cache=True)
def _has_prefill(table: np.ndarray) -> bool:
    """Whether a request still waits for its first token."""
    waits = False
    for i in range(len(table)):
        waits |= todo_tokens(table[i]) > 0 and not is_decode(table[i])
    return waits


@njit(cache=True)
def _run_prefills(
    coef: np.ndarray, table: np.ndarray, now_s: float, limits: np.void, least_s: float, steps: int, outlook: np.ndarray
) -> tuple[float, float]:
    """Iterations until no prefill is left or some margin falls below ``least_s``; returns the time and worst margin.

    What a request is sure to miss by is known before its token comes: the work left takes its time on any engine. A
    prompt that is sure to miss is left out from there on, as it would be by a rollout that starts then.
    """
    tokens, worst_s = np.zeros(len(table), dtype=np.int32), math.inf
    while steps > 0 and worst_s >= least_s and _has_prefill(table):
        seconds, _mix = form_batch(coef, table, now_s, limits, tokens)
        if seconds <= 0.0:
            return now_s, -math.inf  # something cannot run at all
        for i in range(len(table)):
            row = table[i]
            due_s, was_decode = line_due_s(row, now_s), is_decode(row)
            if tokens[i] != 0 and run_tokens(row, tokens[i], limits["acceptance"], True):
                _emit(row, outlook[i], due_s, now_s + seconds)
            elif todo_tokens(row) > 0:
                left_s = decode_s(coef, row) if was_decode else prefill_s(coef, row, limits)
                outlook[i]["margin_s"] = min(outlook[i]["margin_s"], due_s - now_s - seconds - left_s)
                if not was_decode and outlook[i]["margin_s"] < -TOLERANCE_S:
                    leave(row)  # late from now on: what it still gets costs no one anything
            if not outlook[i]["doomed"]:
                worst_s = min(worst_s, outlook[i]["margin_s"])
        now_s, steps = now_s + seconds, steps - 1
    return now_s, worst_s if steps > 0 else -math.inf


@njit(cache=True)
def _run_tail(
    coef: np.ndarray, table: np.ndarray, now_s: float, limits: np.void, outlook: np.ndarray
) -> tuple[float, float]:
    """Decoding to every predicted end, in lockstep or, where that is too slow for some, by deadline.

    Returns the worst margin and the peak of KV tokens.
    """
    tails, rows = np.zeros(len(table), dtype=TAIL), np.empty(len(table), dtype=np.int64)
    count = 0
    for i in range(len(table)):
        if is_decode(table[i]):
            fill_tail(tails[count], table[i], now_s, limits["acceptance"])
            rows[count] = i
            count += 1
    tails, rows = tails[:count], rows[:count]
    _least_s, peak_tokens, first_s = walk_tail(coef, tails, now_s, limits["block_tokens"])
    worst_s = _worst_s(tails, rows, outlook)
    if worst_s < -TOLERANCE_S:
        paced = tails.copy()
        for j in range(count):
            if outlook[rows[j]]["doomed"]:  # what it has lost cannot be made good; its share of the time it still takes
                paced[j]["due_s"] = max(paced[j]["due_s"], now_s + paced[j]["pace_s"])
                paced[j]["deadline_s"] = math.inf
        _least_s, paced_peak_tokens = pace_tail(coef, paced, now_s, limits)
        if _worst_s(paced, rows, outlook) >= -TOLERANCE_S:
            tails, peak_tokens = paced, max(peak_tokens, paced_peak_tokens)
            worst_s = _worst_s(paced, rows, outlook)
    for j in range(count):
        seen, tail = outlook[rows[j]], tails[j]
        seen["finish_s"] = tail["finish_s"]
        seen["margin_s"] = min(seen["margin_s"], tail["margin_s"])
        seen["first_s"] = min(seen["first_s"], first_s)
    return worst_s, peak_tokens


@njit(cache=True)
def _worst_s(tails: np.ndarray, rows: np.ndarray, outlook: np.ndarray) -> float:
    """Least margin of the tails whose requests are not doomed."""
    worst_s = math.inf
    for j in range(len(tails)):
        if not outlook[rows[j]]["doomed"]:
            worst_s = min(worst_s, tails[j]["margin_s"])
    return worst_s


@njit(cache=True)
def rollout(
    coef: np.ndarray, table: np.ndarray, start_s: float, limits: np.void, least_s: float, outlook: np.ndarray
) -> tuple[float, float]:
    """Foretell every request of ``table`` (left as it is) when nothing else arrives; fills ``outlook`` (OUTLOOK[rows]).

    Iterations are formed one by one until no prefill is left, then decoding runs in lockstep to the predicted lengths.
    Work that may not cost anyone an SLO (late, and best effort unless it has a share) is left out and foretold nothing.
    Stops early once a margin is below ``least_s``. Returns the worst margin of all that are not marked as doomed, and
    the peak of KV tokens in lockstep.
    """
    copy, late_s = table.copy(), math.inf
    for i in range(len(copy)):
        row, seen = copy[i], outlook[i]
        seen["first_s"], seen["finish_s"], seen["margin_s"] = math.inf, math.inf, math.inf
        kind = kind_of(coef, row, limits, next_due_s(row, start_s) - start_s)
        is_late = kind in (LATE_DECODE, LATE_PREFILL)
        is_free = kind in (SPARE_DECODE, SPARE_PREFILL) and limits["best_effort_share"] == 0.0
        if is_late:
            seen["margin_s"] = -math.inf
            if not seen["doomed"]:
                late_s = -math.inf
        if is_late or is_free or kind == IDLE:
            leave(row)
    now_s, worst_s = _run_prefills(coef, copy, start_s, limits, least_s, MAX_STEPS, outlook)
    worst_s, peak_tokens = min(worst_s, late_s), 0.0
    if worst_s >= least_s:
        tail_worst_s, peak_tokens = _run_tail(coef, copy, now_s, limits, outlook)
        worst_s = min(worst_s, tail_worst_s)
    for i in range(len(table)):
        tokens = max(1, remaining_tokens(table[i]) - 1)
        seen = outlook[i]
        seen["tpot_s"] = (seen["finish_s"] - seen["first_s"]) / tokens if seen["finish_s"] < math.inf else math.inf
    return worst_s, peak_tokens
