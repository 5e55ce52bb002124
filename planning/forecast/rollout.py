"""Forecast of a replica by its own rules: batches are formed one after the other on a copy of its table."""

import math

import numpy as np
from numba import boolean, float64, from_dtype, int64, njit, types

from planning.batch.classes import (
    BEST_EFFORT_DECODE,
    BEST_EFFORT_PREFILL,
    IDLE,
    LATE_DECODE,
    LATE_PREFILL,
    classify,
    decode_s,
    is_decode,
    prefill_s,
)
from planning.batch.kv import PREEMPT
from planning.batch.preemption import note_preempted
from planning.batch.slo import form_batch
from planning.deadlines import dslo_due_s, next_token_deadline_s, num_uncomputed_tokens, remaining_tokens
from planning.engine import ENGINE_TYPE, EngineModel
from planning.forecast.edf import run_edf
from planning.forecast.lockstep import DECODE_STATE, accepted_tokens, fill_decode_state, run_lockstep
from planning.forecast.steady import run_steady
from planning.kv_reserve import kv_reserve_tokens
from planning.lead import formed_ahead_s
from planning.tables import TABLE_TYPE, RequestTable
from profiles.compiled_once import compiled_once

TOLERANCE_S = 1e-9  # lateness that is rounding
MAX_STEPS = 20_000  # iterations of one rollout; a backlog longer than that is unattainable for every purpose

# What a rollout forecasts of a request.
FORECAST = np.dtype(
    [
        ("begin_s", "f8"),  # start of the first iteration that computes some of it; inf: not forecast
        ("first_s", "f8"),  # when its next first token comes (a running decode: its next token); inf: not forecast
        ("finish_s", "f8"),  # when its last predicted token comes
        ("tpot_s", "f8"),  # mean pace between the two
        ("margin_s", "f8"),  # least time to spare over all tokens and the deadline; inf without objective
        ("unattainable", "?"),  # set by the caller: will miss whatever is decided now, so its margin counts for nothing
    ]
)
FORECASTS_TYPE = from_dtype(FORECAST)[::1]


@njit(cache=True)
def emitted_after(emitted_tokens: int, gain: float) -> int:
    """Tokens emitted after one more decode step of ``gain`` expected tokens, whole and without drift."""
    if gain <= 1.0:
        return emitted_tokens + 1
    return int((math.ceil(emitted_tokens / gain - 1e-9) + 1) * gain + 1e-9)


@njit(cache=True)
def mark_finished(row: np.void) -> None:
    """Mark a request as gone: nothing to do, nothing held."""
    row["running"] = False
    row["computed_tokens"] = row["prompt_tokens"] + row["emitted_tokens"]


@njit(cache=True)
def run_tokens(row: np.void, tokens: int, acceptance: float, departs: bool) -> bool:
    """Move the request on by ``tokens`` of an iteration; True when that emits.

    At its predicted length it leaves if it ``departs``; otherwise the prediction grows up to ``output_cap_tokens``.
    """
    if tokens == PREEMPT:
        note_preempted(row)
        return False
    emitted = row["emitted_tokens"] + 1
    if is_decode(row) and row["spec_tokens"] > 0:
        emitted = emitted_after(row["emitted_tokens"], accepted_tokens(row["spec_tokens"], acceptance))
    elif tokens < num_uncomputed_tokens(row):
        row["running"] = True
        row["computed_tokens"] += tokens
        return False
    limit = row["output_tokens"] if departs else row["output_cap_tokens"]
    row["running"] = True
    row["emitted_tokens"] = min(emitted, max(limit, row["emitted_tokens"] + 1))
    row["computed_tokens"] = row["prompt_tokens"] + row["emitted_tokens"] - 1
    if row["emitted_tokens"] >= limit:
        mark_finished(row)
    elif row["emitted_tokens"] >= row["output_tokens"]:
        row["output_tokens"] = row["emitted_tokens"] + 1
    return True


@njit(cache=True)
def _next_to_join(table: RequestTable, formed_s: float) -> int:
    """How many requests, in the order in which they came, an iteration may contain that is formed then."""
    for i in range(len(table)):
        if table[i]["joined_s"] > formed_s:
            return i
    return len(table)


@compiled_once(
    types.Tuple((float64, float64, int64, float64))(ENGINE_TYPE, TABLE_TYPE, float64, float64, float64, boolean)
)
def advance(
    engine: EngineModel, table: RequestTable, free_at_s: float, ahead_s: float, until_s: float, departs: bool
) -> tuple[float, float, int, float]:
    """Run on ``table`` (in place) each iteration that is formed before ``until_s``, of those who had come by then.

    Returns when the engine is free after the last of them, and how long before that the next one is formed: its batch
    is fixed then (``planning.lead``). It is 0 where ``steps_in_flight`` is 1. Also how many they are, and how long the
    last one takes; 0 after an idle engine.
    ``free_at_s`` and ``ahead_s`` are both as of now. The table is left as it will be when the engine is free. An idle
    engine is free at ``until_s``.
    """
    limits = engine.limits
    tokens, formed, last_s = np.zeros(len(table), dtype=np.int32), 0, 0.0
    while free_at_s - ahead_s < until_s:
        count = _next_to_join(table, free_at_s - ahead_s)
        rows, next_s = table[:count], until_s if count == len(table) else min(until_s, table[count]["joined_s"])
        if not departs:
            free_at_s, ahead_s, steps, steady_s = run_steady(engine, rows, free_at_s, ahead_s, next_s)
            if steps > 0:
                formed, last_s = formed + steps, steady_s
                continue
        seconds, _composition = form_batch(engine, rows, free_at_s, tokens[:count])
        if seconds <= 0.0:
            free_at_s, ahead_s, last_s = max(free_at_s, next_s), 0.0, 0.0
            continue
        free_at_s, ahead_s = free_at_s + seconds, formed_ahead_s(limits, seconds)
        formed, last_s = formed + 1, seconds
        for i in range(count):
            if tokens[i] != 0:
                run_tokens(rows[i], tokens[i], limits["acceptance"], departs)
    return free_at_s, ahead_s, formed, last_s


@njit(cache=True)
def _emit(row: np.void, forecast: np.void, due_s: float, end_s: float) -> None:
    """Record that the request emits at ``end_s`` what was due at ``due_s``."""
    if forecast["first_s"] == math.inf:
        forecast["first_s"] = end_s
    forecast["margin_s"] = min(forecast["margin_s"], due_s - end_s)
    if num_uncomputed_tokens(row) <= 0:
        forecast["finish_s"] = end_s
        forecast["margin_s"] = min(forecast["margin_s"], row["deadline_s"] - end_s)


@njit(cache=True)
def _has_prefill(table: RequestTable) -> bool:
    """Whether a request still waits for its first token."""
    waits = False
    for i in range(len(table)):
        waits |= num_uncomputed_tokens(table[i]) > 0 and not is_decode(table[i])
    return waits


@njit(cache=True, inline="always")
def _forecast_prefills(
    engine: EngineModel, table: RequestTable, now_s: float, least_s: float, steps: int, forecast: np.ndarray
) -> tuple[float, float]:
    """Iterations until no prefill is left or some margin falls below ``least_s``; returns the time and worst margin.

    What a request is sure to miss by is known before its token comes: the work left takes its time on any engine. A
    prompt that is sure to miss is left out from there on, as it would be by a rollout that starts then.
    """
    coef, limits = engine.coef, engine.limits
    tokens, worst_s = np.zeros(len(table), dtype=np.int32), math.inf
    while steps > 0 and worst_s >= least_s and _has_prefill(table):
        seconds, _composition = form_batch(engine, table, now_s, tokens)
        if seconds <= 0.0:
            return now_s, -math.inf  # something cannot run at all
        for i in range(len(table)):
            row = table[i]
            due_s, was_decode = dslo_due_s(row, now_s), is_decode(row)
            if tokens[i] > 0:
                forecast[i]["begin_s"] = min(forecast[i]["begin_s"], now_s)
            if tokens[i] != 0 and run_tokens(row, tokens[i], limits["acceptance"], True):
                _emit(row, forecast[i], due_s, now_s + seconds)
            elif num_uncomputed_tokens(row) > 0:
                left_s = decode_s(coef, row) if was_decode else prefill_s(coef, limits, row)
                forecast[i]["margin_s"] = min(forecast[i]["margin_s"], due_s - now_s - seconds - left_s)
                if not was_decode and forecast[i]["margin_s"] < -TOLERANCE_S:
                    mark_finished(row)  # late from now on: what it still gets costs no one anything
            if not forecast[i]["unattainable"]:
                worst_s = min(worst_s, forecast[i]["margin_s"])
        now_s, steps = now_s + seconds, steps - 1
    return now_s, worst_s if steps > 0 else -math.inf


@njit(cache=True, inline="always")
def _forecast_decodes(
    engine: EngineModel, table: RequestTable, now_s: float, forecast: np.ndarray
) -> tuple[float, float]:
    """Decoding to every predicted end, in lockstep or, where that is too slow for some, by deadline.

    Returns the worst margin and the peak of KV tokens, with what is kept for outputs longer than expected.
    """
    coef, limits = engine.coef, engine.limits
    reserve_tokens = kv_reserve_tokens(table, limits["kv_reserve"])
    decodes, rows = np.zeros(len(table), dtype=DECODE_STATE), np.empty(len(table), dtype=np.int64)
    count = 0
    for i in range(len(table)):
        if is_decode(table[i]):
            fill_decode_state(decodes[count], table[i], now_s, limits["acceptance"])
            rows[count] = i
            count += 1
    decodes, rows = decodes[:count], rows[:count]
    _least_s, peak_tokens, first_s = run_lockstep(coef, decodes, now_s, limits["block_tokens"])
    worst_s = _worst_s(decodes, rows, forecast)
    if worst_s < -TOLERANCE_S:
        paced = decodes.copy()
        for j in range(count):
            if forecast[rows[j]][
                "unattainable"
            ]:  # what it has lost cannot be made good; its share of the time it still takes
                paced[j]["due_s"] = max(paced[j]["due_s"], now_s + paced[j]["pace_s"])
                paced[j]["deadline_s"] = math.inf
        _least_s, paced_peak_tokens = run_edf(engine, paced, now_s)
        if _worst_s(paced, rows, forecast) >= -TOLERANCE_S:
            decodes, peak_tokens = paced, max(peak_tokens, paced_peak_tokens)
            worst_s = _worst_s(paced, rows, forecast)
    for j in range(count):
        row_forecast, decode = forecast[rows[j]], decodes[j]
        row_forecast["finish_s"] = decode["finish_s"]
        row_forecast["margin_s"] = min(row_forecast["margin_s"], decode["margin_s"])
        row_forecast["first_s"] = min(row_forecast["first_s"], first_s)
    return worst_s, peak_tokens + reserve_tokens


@njit(cache=True)
def _worst_s(decodes: np.ndarray, rows: np.ndarray, forecast: np.ndarray) -> float:
    """Least margin of the decodes whose requests are not unattainable."""
    worst_s = math.inf
    for j in range(len(decodes)):
        if not forecast[rows[j]]["unattainable"]:
            worst_s = min(worst_s, decodes[j]["margin_s"])
    return worst_s


@compiled_once(types.UniTuple(float64, 2)(ENGINE_TYPE, TABLE_TYPE, float64, float64, FORECASTS_TYPE))
def forecast_requests(
    engine: EngineModel, table: RequestTable, start_s: float, least_s: float, forecast: np.ndarray
) -> tuple[float, float]:
    """Forecast every request of ``table`` (left as it is) when nothing else arrives; fills ``forecast``
    (FORECAST[rows]).

    Iterations are formed one by one until no prefill is left, then decoding runs in lockstep to the predicted lengths.
    Work that may not cost anyone an SLO (late and best effort) is left out and forecast nothing. What is kept for best
    effort is taken from the time of the others, whether there is any now or not: iterations take so much longer.
    Stops early once a margin is below ``least_s``. Returns the worst margin of all that are not marked as unattainable,
    and the peak of KV tokens in lockstep, with what ``kv_reserve`` keeps for outputs longer than expected.
    """
    coef, limits, copy, late_s = engine.coef, engine.limits, table.copy(), math.inf
    for i in range(len(copy)):
        row, row_forecast = copy[i], forecast[i]
        row_forecast["first_s"], row_forecast["finish_s"], row_forecast["margin_s"] = math.inf, math.inf, math.inf
        row_forecast["begin_s"] = math.inf
        request_class = classify(coef, limits, row, next_token_deadline_s(row, start_s) - start_s)
        is_late = request_class in (LATE_DECODE, LATE_PREFILL)
        is_free = request_class in (BEST_EFFORT_DECODE, BEST_EFFORT_PREFILL)
        if is_late:
            row_forecast["margin_s"] = -math.inf
            if not row_forecast["unattainable"]:
                late_s = -math.inf
        if is_late or is_free or request_class == IDLE:
            mark_finished(row)
    slower = EngineModel(coef / (1.0 - limits["best_effort_share"]), limits)
    now_s, worst_s = _forecast_prefills(slower, copy, start_s, least_s, MAX_STEPS, forecast)
    worst_s, peak_tokens = min(worst_s, late_s), 0.0
    if worst_s >= least_s:
        decode_worst_s, peak_tokens = _forecast_decodes(slower, copy, now_s, forecast)
        worst_s = min(worst_s, decode_worst_s)
    for i in range(len(table)):
        tokens = max(1, remaining_tokens(table[i]) - 1)
        row_forecast = forecast[i]
        row_forecast["tpot_s"] = (
            (row_forecast["finish_s"] - row_forecast["first_s"]) / tokens
            if row_forecast["finish_s"] < math.inf
            else math.inf
        )
    return worst_s, peak_tokens
