"""Batches in an order that is given: requests get what they can use until the token budget is spent.

A bid says who may take a running request's place: a newcomer whose bid exceeds what that one's place costs.
"""

import math
from typing import NamedTuple

import numpy as np
from numba import boolean, float64, int32, int64, njit, types

from planning.batch.classes import is_decode
from planning.batch.composition import TOKENS, add_tokens, composition_s
from planning.batch.kv import FREE_KV, FREE_SEQUENCES, PREEMPT, held_kv_tokens, needed, reserve
from planning.deadlines import num_uncomputed_tokens
from planning.engine import ENGINE_TYPE, EngineModel
from planning.limits import most_sequences
from planning.order import numbers, order_of
from planning.tables import TABLE_TYPE, RequestTable
from profiles.compiled_once import compiled_once

RUN_BY_BID = types.Tuple((float64, float64[::1]))(
    ENGINE_TYPE, TABLE_TYPE, int64[::1], types.UniTuple(float64[::1], 2), boolean, int32[::1]
)


class Queue(NamedTuple):
    """Requests in the order in which they are served, and what the engine has left for them."""

    table: RequestTable
    order: np.ndarray  # i8[n], rows of the table
    block_tokens: int
    bids: np.ndarray  # f8[rows]; -inf: a newcomer that takes nobody's place
    costs: np.ndarray  # f8[rows], of the place of a running request; inf: no newcomer may have it
    free: np.ndarray  # i8[2]
    tokens_out: np.ndarray  # i4[rows]


@njit(cache=True)
def _has_place(queue: Queue, i: int) -> bool:
    """Whether request ``i`` holds KV and is not in the batch. One with nothing to run is about to end: it keeps it."""
    row = queue.table[i]
    return row["running"] and queue.tokens_out[i] == 0 and num_uncomputed_tokens(row) > 0


@njit(cache=True)
def _may_yield(queue: Queue, i: int, bid: float) -> bool:
    """Whether request ``i`` has a place that costs less than ``bid``."""
    return _has_place(queue, i) and bid > queue.costs[i]


@njit(cache=True)
def _has_victims(queue: Queue, pos: int, tokens: int, bid: float) -> bool:
    """Whether those behind ``pos`` that may yield hold enough together."""
    kv_tokens, sequences = needed(queue.table[queue.order[pos]], tokens, queue.block_tokens)
    kv_tokens, sequences = kv_tokens - queue.free[FREE_KV], sequences - queue.free[FREE_SEQUENCES]
    for behind in range(len(queue.order) - 1, pos, -1):
        if kv_tokens <= 0 and sequences <= 0:
            break
        i = queue.order[behind]
        if _may_yield(queue, i, bid):
            kv_tokens -= held_kv_tokens(queue.table[i], queue.block_tokens)
            sequences -= 1
    return kv_tokens <= 0 and sequences <= 0


@njit(cache=True)
def _reserve(queue: Queue, pos: int, tokens: int) -> bool:
    """Room for ``tokens`` of the request at ``pos``, from the last ones behind it if need be.

    A running request may take anyone's behind it, a newcomer only what its bid buys. Where fewer may run than before
    (CALM's size falls between two frames), the first running one makes the last ones give up their places.
    """
    row = queue.table[queue.order[pos]]
    if reserve(row, tokens, queue.block_tokens, queue.free):
        return True
    bid = math.inf if row["running"] else queue.bids[queue.order[pos]]
    if not row["running"] and not _has_victims(queue, pos, tokens, bid):
        return False
    for behind in range(len(queue.order) - 1, pos, -1):
        i = queue.order[behind]
        if _may_yield(queue, i, bid) or (row["running"] and _has_place(queue, i)):
            queue.tokens_out[i] = PREEMPT
            queue.free[FREE_KV] += held_kv_tokens(queue.table[i], queue.block_tokens)
            queue.free[FREE_SEQUENCES] += 1
            if reserve(row, tokens, queue.block_tokens, queue.free):
                return True
    return False


@compiled_once(RUN_BY_BID)
def run_by_bid(
    engine: EngineModel,
    table: RequestTable,
    order: np.ndarray,
    bids: tuple[np.ndarray, np.ndarray],
    keeps_decodes: bool,
    tokens_out: np.ndarray,
) -> tuple[float, np.ndarray]:
    """Give every request of ``order`` what it can use until the budget is spent; newcomers wait behind one another, but
    not behind one that could not run alone.

    ``bids`` are the bids and the costs of ``Queue``. With ``keeps_decodes`` prompts leave every decode its tokens.
    """
    coef, limits = engine.coef, engine.limits
    block, free, composition = limits["block_tokens"], np.zeros(2, np.int64), np.zeros(5)
    free[FREE_KV] = limits["kv_capacity_tokens"] // block * block
    free[FREE_SEQUENCES] = most_sequences(limits)
    kept = 0
    for i in range(len(table)):
        tokens_out[i] = 0
        if table[i]["running"]:
            free[FREE_KV] -= held_kv_tokens(table[i], block)
            free[FREE_SEQUENCES] -= 1
            if keeps_decodes and is_decode(table[i]):
                kept += 1 + table[i]["spec_tokens"]
    queue, is_full = Queue(table, order, block, bids[0], bids[1], free, tokens_out), False
    for pos in range(len(order)):
        i = order[pos]
        row, left = table[i], int(limits["max_batch_tokens"] - composition[TOKENS])
        if is_decode(row):
            tokens = 1 + row["spec_tokens"]
            kept -= tokens if keeps_decodes else 0
        else:
            tokens = min(num_uncomputed_tokens(row), left - kept)
        if num_uncomputed_tokens(row) <= 0 or tokens_out[i] == PREEMPT or not 0 < tokens <= left:
            continue
        if is_full and not row["running"]:
            continue
        if _reserve(queue, pos, tokens):
            tokens_out[i] = tokens
            add_tokens(row, tokens, composition)
        elif not row["running"] and needed(row, tokens, block)[0] <= limits["kv_capacity_tokens"]:
            is_full = True
    return composition_s(coef, composition), composition


@njit(cache=True)
def run_in_order(
    engine: EngineModel, table: RequestTable, order: np.ndarray, is_blind: bool, tokens_out: np.ndarray
) -> tuple[float, np.ndarray]:
    """``run_by_bid`` where newcomers take only best effort's places, and none if they are that or ``is_blind``."""
    bids, costs = np.full(len(table), -math.inf), np.full(len(table), math.inf)
    if not is_blind:
        for i in range(len(table)):
            if table[i]["best_effort"]:
                costs[i] = 0.0
            else:
                bids[i] = 1.0
    return run_by_bid(engine, table, order, (bids, costs), False, tokens_out)


@compiled_once(int64[::1](float64[::1], TABLE_TYPE))
def sorted_rows(first: np.ndarray, table: RequestTable) -> np.ndarray:
    """Rows by ``first``, then by arrival, then in table order."""
    by_arrival = order_of(numbers(table["arrival_s"]))
    return by_arrival[order_of(first[by_arrival])]
