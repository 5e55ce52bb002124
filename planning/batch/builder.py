"""A batch in the making: the state that the steps of batch formation share, and how a request gets room in it."""

import math
from typing import NamedTuple

import numpy as np
from numba import boolean, float64, int32, int64, njit, types

from planning.batch.aging import second_slack_s
from planning.batch.classes import BEST_EFFORT_DECODE, IDLE, LATE_DECODE, classify
from planning.batch.kv import FREE_KV, FREE_SEQUENCES, PREEMPT, empty_engine, held_kv_tokens, needed, reserve
from planning.batch.preemption import (
    BEST_EFFORT,
    BEST_EFFORT_HELD,
    LATE,
    LATE_HELD,
    NEVER,
    ON_TIME_STILL,
    WOULD_MISS,
    choose_victims,
    is_held,
    recompute_s,
)
from planning.deadlines import next_token_deadline_s, num_uncomputed_tokens
from planning.engine import ENGINE_TYPE, EngineModel
from planning.order import integers, order_of, order_of_integers
from planning.tables import TABLE_TYPE, RequestTable
from profiles.compiled_once import compiled_once
from profiles.kernels import iteration_s

KEPT_DEVIATIONS, KEPT_SHARE = 0.25, 0.2  # see ``tokens_kept_free``


class BatchBuilder(NamedTuple):
    """A batch in the making: arrays that the steps of batch formation fill in."""

    engine: EngineModel
    table: RequestTable  # REQUEST[rows]; only read
    now_s: float  # start of the iteration
    class_of: np.ndarray  # i8[rows], class of each request
    counts: np.ndarray  # i8[IDLE + 1], rows of each class
    slack_s: np.ndarray  # f8[rows], by the second line for late requests and best effort
    free: np.ndarray  # i8[2]
    composition: np.ndarray  # f8[5]
    tokens_out: np.ndarray  # i4[rows]
    chunk_budget: int  # tokens, see ``planning.batch.prefill_only``


_INTEGERS, _NUMBERS = int64[::1], float64[::1]
BUILDER_TYPE = types.NamedTuple(
    (ENGINE_TYPE, TABLE_TYPE, float64, _INTEGERS, _INTEGERS, _NUMBERS, _INTEGERS, _NUMBERS, int32[::1], int64),
    BatchBuilder,
)


@njit(cache=True)
def classify_requests(builder: BatchBuilder) -> None:
    """Classify the requests, measure their slack (by the second line where they have no other) and what the engine has
    left; empties the batch."""
    engine, table, now_s = builder.engine, builder.table, builder.now_s
    coef, limits, class_of, counts, slack_s = (
        engine.coef,
        engine.limits,
        builder.class_of,
        builder.counts,
        builder.slack_s,
    )
    free, tokens_out, block_tokens = builder.free, builder.tokens_out, limits["block_tokens"]
    empty_engine(limits, free)
    for i in range(len(table)):
        row = table[i]
        slack_s[i] = next_token_deadline_s(row, now_s) - now_s
        class_of[i] = classify(coef, limits, row, slack_s[i])
        if LATE_DECODE <= class_of[i] < IDLE:
            slack_s[i] = second_slack_s(row, limits, class_of[i], now_s)
        counts[class_of[i]] += 1
        tokens_out[i] = 0
        if row["running"]:
            free[FREE_KV] -= held_kv_tokens(row, block_tokens)
            free[FREE_SEQUENCES] -= 1


@njit(cache=True)
def best_effort_share(builder: BatchBuilder) -> float:
    """The part of the time that is kept for best effort: none while nobody of it is older than ``aging_s``."""
    for i in range(len(builder.table)):
        if BEST_EFFORT_DECODE <= builder.class_of[i] < IDLE and builder.slack_s[i] < 0.0:
            return builder.engine.limits["best_effort_share"]
    return 0.0


@njit(cache=True)
def _may_yield(builder: BatchBuilder, i: int, rank: int) -> bool:
    """Whether request ``i`` holds KV, is not in the batch and is of class ``rank`` or a less entitled one."""
    return builder.table[i]["running"] and builder.tokens_out[i] == 0 and rank <= builder.class_of[i] < IDLE


@njit(cache=True)
def _level(builder: BatchBuilder, i: int) -> int:
    """Before whom request ``i``, which may yield, gives up its KV cache: see ``planning.batch.preemption``."""
    row, request_class = builder.table[i], builder.class_of[i]
    if request_class >= BEST_EFFORT_DECODE:
        return BEST_EFFORT_HELD if is_held(row) else BEST_EFFORT
    if request_class >= LATE_DECODE:
        return LATE_HELD if is_held(row) else LATE
    coef = builder.engine.coef
    stays = builder.slack_s[i] >= recompute_s(coef, row) + iteration_s(coef, 1.0, 0.0, 0.0, 1.0, 0.0)
    return ON_TIME_STILL if stays else WOULD_MISS


@njit(cache=True)
def _preempt(builder: BatchBuilder, rank: int, kv_tokens: int, sequences: int) -> None:
    """Take the KV cache of requests that may yield until so much more is free."""
    table, block_tokens = builder.table, builder.engine.limits["block_tokens"]
    levels = np.full(len(table), NEVER)
    for i in range(len(table)):
        if _may_yield(builder, i, rank):
            levels[i] = _level(builder, i)
    for victim in choose_victims(builder.engine.coef, table, levels, block_tokens, kv_tokens, sequences):
        builder.free[FREE_KV] += held_kv_tokens(table[victim], block_tokens)
        builder.free[FREE_SEQUENCES] += 1
        builder.tokens_out[victim] = PREEMPT


@njit(cache=True)
def tokens_kept_free(builder: BatchBuilder) -> float:
    """KV tokens that best effort leaves free when it begins or resumes, so that the next request with an objective does
    not preempt it at once: ``KEPT_DEVIATIONS`` of the room that those hold as they come and go by chance (a deviation
    is the root of their summed squares), at most ``KEPT_SHARE`` of the KV cache."""
    table, squares = builder.table, 0.0
    for i in range(len(table)):
        if builder.class_of[i] >= BEST_EFFORT_DECODE:
            continue
        if builder.tokens_out[i] > 0 or (table[i]["running"] and builder.tokens_out[i] == 0):
            held = float(table[i]["computed_tokens"] + num_uncomputed_tokens(table[i]))
            squares += held * held
    return min(KEPT_DEVIATIONS * math.sqrt(squares), KEPT_SHARE * builder.engine.limits["kv_capacity_tokens"])


@njit(cache=True)
def free_after_preemption(builder: BatchBuilder, rank: int) -> np.ndarray:
    """What the engine would have left if every request that may yield to ``rank`` did."""
    table, block_tokens = builder.table, builder.engine.limits["block_tokens"]
    most = builder.free.copy()
    for i in range(len(table)):
        if _may_yield(builder, i, rank):
            most[FREE_KV] += held_kv_tokens(table[i], block_tokens)
            most[FREE_SEQUENCES] += 1
    return most


@njit(cache=True)
def held_by_best_effort(builder: BatchBuilder) -> int:
    """KV tokens that the engine would have left besides what is free, if all best effort that runs had ended."""
    table, block_tokens, kv_tokens = builder.table, builder.engine.limits["block_tokens"], 0
    for i in range(len(table)):
        if builder.class_of[i] >= BEST_EFFORT_DECODE and builder.tokens_out[i] != PREEMPT:
            kv_tokens += held_kv_tokens(table[i], block_tokens)
    return kv_tokens


@compiled_once(boolean(BUILDER_TYPE, int64, int64, int64))
def reserve_with_preemption(builder: BatchBuilder, i: int, tokens: int, rank: int) -> bool:
    """Reserve room for ``tokens`` of request ``i``; preempts class ``rank`` and less entitled ones, but never in
    vain."""
    table, block_tokens = builder.table, builder.engine.limits["block_tokens"]
    builder.tokens_out[i] = tokens  # not its own victim
    if not reserve(table[i], tokens, block_tokens, free_after_preemption(builder, rank)):
        builder.tokens_out[i] = 0
        return False
    if not reserve(table[i], tokens, block_tokens, builder.free):
        kv_tokens, sequences = needed(table[i], tokens, block_tokens)
        _preempt(builder, rank, kv_tokens - builder.free[FREE_KV], sequences - builder.free[FREE_SEQUENCES])
        reserve(table[i], tokens, block_tokens, builder.free)
    return True


@njit(cache=True)
def _by_work(table: RequestTable, rows: np.ndarray) -> np.ndarray:
    """Rows by work to do, then by id. O(n log n): both sorts are stable."""
    by_id = rows[order_of_integers(integers(table["id"][rows]))]
    todo = np.empty(len(rows), dtype=np.int64)
    for k in range(len(rows)):
        todo[k] = num_uncomputed_tokens(table[by_id[k]])
    return by_id[order_of_integers(todo)]


@njit(cache=True)
def rows_of(builder: BatchBuilder, request_class: int) -> np.ndarray:
    """Rows of one class, in table order."""
    class_of, rows, count = builder.class_of, np.empty(builder.counts[request_class], dtype=np.int64), 0
    for i in range(len(class_of)):
        if class_of[i] == request_class:
            rows[count] = i
            count += 1
    return rows


@compiled_once(int64[::1](BUILDER_TYPE, int64))
def by_slack(builder: BatchBuilder, request_class: int) -> np.ndarray:
    """Rows of one class, least slack first; ties by work to do, then by id, so that table order decides nothing."""
    table, slack_s, rows, first = builder.table, builder.slack_s, rows_of(builder, request_class), 0
    rows = rows[order_of(slack_s[rows])] if len(rows) > 1 else rows
    for end in range(1, len(rows) + 1):
        if end < len(rows) and slack_s[rows[end]] == slack_s[rows[first]]:
            continue
        if end - first > 1:  # all that is best effort ties at infinity
            rows[first:end] = _by_work(table, rows[first:end])
        first = end
    return rows
