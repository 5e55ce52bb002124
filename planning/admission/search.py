"""Choosing a set of requests to admit: the DP proposes sets, a forecast of the replica's own batches confirms one."""

import math

import numpy as np
from numba import boolean, float64, int64, njit, types

from planning.admission.demand import prefill_cost_tokens
from planning.admission.dp import MAX_CHOICES
from planning.admission.dp_inputs import CHOSEN, OPEN, PROMISED, REFUSED, propose
from planning.batch.classes import LATE_DECODE, LATE_PREFILL, classify
from planning.deadlines import next_token_deadline_s, remaining_tokens
from planning.engine import ENGINE_TYPE, EngineModel
from planning.forecast.rollout import FORECAST, FORECASTS_TYPE, TOLERANCE_S, forecast_requests
from planning.limits import usable_kv_tokens
from planning.order import integers, order_of, order_of_integers, place_in
from planning.tables import REQUEST, TABLE_TYPE, RequestTable
from profiles.compiled_once import compiled_once
from profiles.kernels import Coefficients

# Reasons in kernels: positions in planning.admission.plan.REASONS.
ADMITTED, TTFT, TPOT, DEADLINE, BREAKS, KV_FULL, DISPLACED = range(7)
EXHAUSTIVE = 3  # so few open requests are chosen by trying every set


@njit(cache=True)
def why_unattainable(row: np.void, row_forecast: np.void, worst_s: float, peak_tokens: float, limits: np.void) -> int:
    """Reason code for one request after a rollout with it; ``ADMITTED`` when everything promised holds with it."""
    if row_forecast["margin_s"] < -TOLERANCE_S:
        if (
            row_forecast["first_s"] == math.inf
            or row_forecast["first_s"] > row["arrival_s"] + row["ttft_s"] + TOLERANCE_S
        ):
            return TTFT
        return DEADLINE if row_forecast["finish_s"] > row["deadline_s"] + TOLERANCE_S else TPOT
    if worst_s < -TOLERANCE_S:
        return BREAKS
    if peak_tokens > usable_kv_tokens(limits):
        return KV_FULL
    return ADMITTED


@compiled_once(types.UniTuple(float64, 2)(ENGINE_TYPE, TABLE_TYPE, boolean[::1], float64, FORECASTS_TYPE))
def forecast_subset(
    engine: EngineModel, table: RequestTable, is_in: np.ndarray, start_s: float, forecast: np.ndarray
) -> tuple[float, float]:
    """Roll out the rows marked ``is_in`` (bool[rows]); fills their ``forecast`` (FORECAST[rows]) in and returns the
    worst margin in seconds and the peak of KV tokens."""
    rows = np.flatnonzero(is_in)
    row_forecast = forecast[rows]
    worst_s, peak_tokens = forecast_requests(engine, table[rows], start_s, -TOLERANCE_S, row_forecast)
    for pos in range(len(rows)):
        forecast[rows[pos]] = row_forecast[pos]
    return worst_s, peak_tokens


@njit(cache=True)
def mark_late(engine: EngineModel, table: RequestTable, start_s: float, forecast: np.ndarray) -> None:
    """Mark in ``forecast`` (FORECAST[rows]) those of the promised requests ``table`` as unattainable whose next
    deadline is out of reach already."""
    coef, limits = engine.coef, engine.limits
    for i in range(len(table)):
        slack_s = next_token_deadline_s(table[i], start_s) - start_s
        request_class = classify(coef, limits, table[i], slack_s)
        forecast[i]["unattainable"] = request_class in (LATE_DECODE, LATE_PREFILL)


@compiled_once(types.void(int64[::1], int64[::1], int64))
def _set(status: np.ndarray, rows: np.ndarray, code: int) -> None:
    """``status[rows] = code``, which numba would compile with a message about shapes into each kernel."""
    for i in rows:
        status[i] = code


@njit(cache=True)
def is_late_beside(engine: EngineModel, table: RequestTable, stays: np.ndarray, row: np.void, start_s: float) -> bool:
    """Whether a new request (REQUEST[]) is late beside those rows of ``table`` alone that must stay (bool[rows]): then
    no set with more of them admits it. Ends with the first iteration that leaves too little time for it."""
    count = stays.sum()
    together, forecast = np.empty(count + 1, dtype=REQUEST), np.zeros(count + 1, dtype=FORECAST)
    together[:count] = table[stays]
    together[count] = row
    mark_late(engine, together[:count], start_s, forecast)
    forecast_requests(engine, together, start_s, -TOLERANCE_S, forecast)
    return bool(forecast[count]["margin_s"] < -TOLERANCE_S)


@njit(cache=True, inline="always")
def mark_unattainable(
    engine: EngineModel, table: RequestTable, status: np.ndarray, start_s: float, forecast: np.ndarray
) -> bool:
    """Mark in ``forecast`` (FORECAST[rows]) promised requests, by ``status`` (i8[rows]), that will miss even if nothing
    more is promised; True when there are any."""
    rows = np.flatnonzero(status == PROMISED)
    row_forecast = np.zeros(len(rows), dtype=FORECAST)
    forecast_requests(engine, table[rows], start_s, -math.inf, row_forecast)
    found = False
    for pos in range(len(rows)):
        forecast[rows[pos]]["unattainable"] = row_forecast[pos]["margin_s"] < -TOLERANCE_S
        found |= forecast[rows[pos]]["unattainable"]
    return found


@njit(cache=True)
def _is_attainable(
    engine: EngineModel, table: RequestTable, is_in: np.ndarray, start_s: float, forecast: np.ndarray
) -> bool:
    """Whether everything marked ``is_in`` keeps its SLO and fits the KV cache."""
    worst_s, peak_tokens = forecast_subset(engine, table, is_in, start_s, forecast)
    return worst_s >= -TOLERANCE_S and peak_tokens <= usable_kv_tokens(engine.limits)


@compiled_once(int64[::1](float64[::1], TABLE_TYPE, int64[::1]))
def _by_value_per_work(coef: Coefficients, table: RequestTable, options: np.ndarray) -> np.ndarray:
    """Open requests, most value per work first (unit values: shortest first), ties by id."""
    weight = np.empty(len(options))
    for j in range(len(options)):
        row = table[options[j]]
        work = prefill_cost_tokens(coef, row) + remaining_tokens(row)
        weight[j] = -row["value"] / max(1.0, work)
    by_id = order_of_integers(integers(table["id"][options]))
    return options[by_id[order_of(weight[by_id])]]


@njit(cache=True, inline="always")
def _try_every_set(
    engine: EngineModel,
    table: RequestTable,
    status: np.ndarray,
    ranked: np.ndarray,
    start_s: float,
    forecast: np.ndarray,
) -> None:
    """Choose the most valuable attainable set of few open requests; of equal ones the one of preferred requests."""
    count = len(ranked)
    worth = np.zeros(1 << count)
    for bits in range(1 << count):
        for j in range(count):
            if (bits >> j) & 1:
                worth[bits] += table[ranked[j]]["value"] + 1e-9
    for bits in order_of(-worth):
        is_in = status == PROMISED
        for j in range(count):
            is_in[ranked[j]] = (bits >> j) & 1
        if bits == 0 or _is_attainable(engine, table, is_in, start_s, forecast):
            for j in range(count):
                status[ranked[j]] = CHOSEN if (bits >> j) & 1 else OPEN
            return


@njit(cache=True, inline="always")
def _take_dp_choice(
    engine: EngineModel,
    table: RequestTable,
    status: np.ndarray,
    ranked: np.ndarray,
    start_s: float,
    forecast: np.ndarray,
) -> None:
    """Choose what the DP proposes, less the least preferred requests until the rest is attainable."""
    _set(status, ranked[MAX_CHOICES:], REFUSED)
    options = ranked[:MAX_CHOICES]
    options = options[order_of_integers(options)]
    picked = propose(engine, table, status, options, start_s)
    is_in = status == PROMISED
    for i in options[picked]:
        is_in[i] = True
    dearest = len(ranked)
    while picked.any() and not _is_attainable(engine, table, is_in, start_s, forecast):
        dearest -= 1
        while not is_in[ranked[dearest]]:
            dearest -= 1
        is_in[ranked[dearest]], picked[place_in(options, ranked[dearest])] = False, False
    _set(status, options[picked], CHOSEN)
    _set(status, ranked[MAX_CHOICES:], OPEN)


@njit(cache=True, inline="always")
def _fill_up(
    engine: EngineModel,
    table: RequestTable,
    status: np.ndarray,
    ranked: np.ndarray,
    start_s: float,
    forecast: np.ndarray,
) -> np.ndarray:
    """Try what is still open beside what was chosen, most preferred first; returns every row's reason code."""
    limits = engine.limits
    reasons = np.zeros(len(table), dtype=np.int64)
    for i in ranked:
        if status[i] != OPEN:
            continue
        status[i] = CHOSEN
        row_forecast = forecast.copy()
        is_in = (status == PROMISED) | (status == CHOSEN)
        worst_s, peak_tokens = forecast_subset(engine, table, is_in, start_s, row_forecast)
        reasons[i] = why_unattainable(table[i], row_forecast[i], worst_s, peak_tokens, limits)
        if reasons[i] == ADMITTED:
            forecast[:] = row_forecast
        else:
            status[i] = REFUSED
    return reasons


@compiled_once(int64[::1](ENGINE_TYPE, TABLE_TYPE, int64[::1], float64, FORECASTS_TYPE, boolean))
def choose(
    engine: EngineModel,
    table: RequestTable,
    status: np.ndarray,
    start_s: float,
    forecast: np.ndarray,
    searches: bool,
) -> np.ndarray:
    """Mark every ``OPEN`` row of ``table`` as ``CHOSEN`` or ``REFUSED`` beside the ``PROMISED`` ones (in ``status``).

    The chosen set is attainable by a forecast of batch formation to every predicted end. In the steady state one
    forecast of everything settles it; up to ``EXHAUSTIVE`` requests by trying every set; beyond, the DP proposes, the
    forecast repairs, and what still fits is added. Without ``searches`` what fits is added alone, most value per work
    first. Fills ``forecast`` (FORECAST[rows]); returns reason codes.
    """
    everyone = np.ones(len(table), np.bool_)
    options = np.flatnonzero(status == OPEN)
    mark_late(engine, table, start_s, forecast)
    is_late = forecast["unattainable"].copy()
    for i in options:
        forecast[i]["unattainable"] = False
    if len(options) == 0 or _is_attainable(engine, table, everyone, start_s, forecast):
        _set(status, options, CHOSEN)
        return np.zeros(len(table), dtype=np.int64)
    has_unattainable = mark_unattainable(engine, table, status, start_s, forecast)
    if has_unattainable and _is_attainable(engine, table, everyone, start_s, forecast):
        _set(status, options, CHOSEN)
        return np.zeros(len(table), dtype=np.int64)
    ranked = _by_value_per_work(engine.coef, table, options)
    late, timely = ranked[is_late[ranked]], ranked[~is_late[ranked]]
    _set(status, late, REFUSED)  # nothing could be promised to them
    if searches and 1 < len(timely) <= EXHAUSTIVE:
        _try_every_set(engine, table, status, timely, start_s, forecast)
    elif searches and len(timely) > EXHAUSTIVE:
        _take_dp_choice(engine, table, status, timely, start_s, forecast)
    _set(status, late, OPEN)  # each is told why
    reasons = _fill_up(engine, table, status, ranked, start_s, forecast)
    if not (status == CHOSEN).any():
        forecast_subset(engine, table, status == PROMISED, start_s, forecast)
    return reasons
