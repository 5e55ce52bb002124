"""A batch in the making: the state that the steps of batch formation share, and how a request gets room in it."""

from typing import NamedTuple

import numpy as np
from numba import boolean, float64, int32, int64, njit, types

from planning.batch.classes import IDLE, classify
from planning.batch.kv import FREE_KV, FREE_SEQUENCES, PREEMPT, empty_engine, held_kv_tokens, reserve
from planning.deadlines import next_token_deadline_s, num_uncomputed_tokens
from planning.engine import ENGINE_TYPE, EngineModel
from planning.order import integers, order_of, order_of_integers
from planning.tables import TABLE_TYPE, RequestTable
from profiles.compiled_once import compiled_once


class BatchBuilder(NamedTuple):
    """A batch in the making: arrays that the steps of batch formation fill in."""

    engine: EngineModel
    table: RequestTable  # REQUEST[rows]; only read
    now_s: float  # start of the iteration
    class_of: np.ndarray  # i8[rows], class of each request
    counts: np.ndarray  # i8[IDLE + 1], rows of each class
    slack_s: np.ndarray  # f8[rows]
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
    """Classify the requests, measure their slack and what the engine has left; empties the batch."""
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
        counts[class_of[i]] += 1
        tokens_out[i] = 0
        if row["running"]:
            free[FREE_KV] -= held_kv_tokens(row, block_tokens)
            free[FREE_SEQUENCES] -= 1


@njit(cache=True)
def _may_yield(builder: BatchBuilder, i: int, rank: int) -> bool:
    """Whether request ``i`` holds KV, is not in the batch and is of class ``rank`` or a less entitled one."""
    return builder.table[i]["running"] and builder.tokens_out[i] == 0 and rank <= builder.class_of[i] < IDLE


@njit(cache=True)
def _preempt_one(builder: BatchBuilder, rank: int) -> None:
    """Take the KV cache of the least entitled, latest arrived request that may yield."""
    table, block_tokens, victim = builder.table, builder.engine.limits["block_tokens"], -1
    for i in range(len(table)):
        if _may_yield(builder, i, rank):
            row, worst = table[i], table[victim]
            if victim < 0 or (builder.class_of[i], row["arrival_s"], row["id"]) > (
                builder.class_of[victim],
                worst["arrival_s"],
                worst["id"],
            ):
                victim = i
    builder.free[FREE_KV] += held_kv_tokens(table[victim], block_tokens)
    builder.free[FREE_SEQUENCES] += 1
    builder.tokens_out[victim] = PREEMPT


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


@compiled_once(boolean(BUILDER_TYPE, int64, int64, int64))
def reserve_with_preemption(builder: BatchBuilder, i: int, tokens: int, rank: int) -> bool:
    """Reserve room for ``tokens`` of request ``i``; preempts class ``rank`` and less entitled ones, but never in
    vain."""
    table, block_tokens = builder.table, builder.engine.limits["block_tokens"]
    builder.tokens_out[i] = tokens  # not its own victim
    if not reserve(table[i], tokens, block_tokens, free_after_preemption(builder, rank)):
        builder.tokens_out[i] = 0
        return False
    while not reserve(table[i], tokens, block_tokens, builder.free):
        _preempt_one(builder, rank)
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
