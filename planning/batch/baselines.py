"""Batch policies without a model of time: serve in a fixed order until a token budget is spent.

The usual schedulers of the field, for comparison: arrival order (vLLM), decodes first in a fixed chunk (Sarathi-Serve),
earliest deadline first, shortest job first. Same signature as ``planning.batch.slo.form_batch``; the budget is
``limits["max_batch_tokens"]``.
"""

import math
from typing import NamedTuple

import numpy as np
from numba import njit

from planning.batch.classes import is_decode
from planning.batch.composition import TOKENS, add_tokens, composition_s
from planning.batch.kv import FREE_KV, FREE_SEQUENCES, PREEMPT, held_kv_tokens, reserve
from planning.deadlines import next_token_deadline_s, num_uncomputed_tokens, remaining_tokens
from planning.engine import EngineModel
from planning.tables import RequestTable


class Queue(NamedTuple):
    """Requests in the order in which they are served, and what the engine has left for them."""

    table: RequestTable
    order: np.ndarray  # i8[n], rows of the table
    block_tokens: int
    is_blind: bool  # to objectives: nobody is best effort
    free: np.ndarray  # i8[2]
    tokens_out: np.ndarray  # i4[rows]


@njit(cache=True)
def _victim(queue: Queue, pos: int, only_spare: bool) -> int:
    """The last request in the order behind ``pos`` that holds KV and is not in the batch; -1: there is none."""
    for behind in range(len(queue.order) - 1, pos, -1):
        i = queue.order[behind]
        row = queue.table[i]
        if row["running"] and queue.tokens_out[i] == 0 and (row["best_effort"] or not only_spare):
            return int(i)
    return -1


@njit(cache=True)
def _reserve(queue: Queue, pos: int, tokens: int) -> bool:
    """Room for ``tokens`` of the request at ``pos``, from requests behind it if need be.

    A running request may take anyone's behind it; a newcomer only best effort's, and only if it is none itself.
    """
    row = queue.table[queue.order[pos]]
    while not reserve(row, tokens, queue.block_tokens, queue.free):
        if not row["running"] and (queue.is_blind or row["best_effort"]):
            return False
        victim = _victim(queue, pos, not row["running"])
        if victim < 0:
            return False
        queue.tokens_out[victim] = PREEMPT
        queue.free[FREE_KV] += held_kv_tokens(queue.table[victim], queue.block_tokens)
        queue.free[FREE_SEQUENCES] += 1
    return True


@njit(cache=True)
def run_in_order(
    engine: EngineModel, table: RequestTable, order: np.ndarray, is_blind: bool, tokens_out: np.ndarray
) -> tuple[float, np.ndarray]:
    """Give every request of ``order`` what it can use until the budget is spent; newcomers wait behind one another."""
    coef, limits = engine.coef, engine.limits
    block, free, composition = limits["block_tokens"], np.zeros(2, np.int64), np.zeros(5)
    free[FREE_KV] = limits["kv_capacity_tokens"] // block * block
    free[FREE_SEQUENCES] = limits["max_running"]
    for i in range(len(table)):
        tokens_out[i] = 0
        if table[i]["running"]:
            free[FREE_KV] -= held_kv_tokens(table[i], block)
            free[FREE_SEQUENCES] -= 1
    queue, is_full = Queue(table, order, block, is_blind, free, tokens_out), False
    for pos in range(len(order)):
        i = order[pos]
        row, left = table[i], int(limits["max_batch_tokens"] - composition[TOKENS])
        tokens = 1 + row["spec_tokens"] if is_decode(row) else min(num_uncomputed_tokens(row), left)
        if num_uncomputed_tokens(row) <= 0 or tokens_out[i] == PREEMPT or not 0 < tokens <= left:
            continue
        if is_full and not row["running"]:
            continue
        if _reserve(queue, pos, tokens):
            tokens_out[i] = tokens
            add_tokens(row, tokens, composition)
        elif not row["running"]:
            is_full = True
    return composition_s(coef, composition), composition


@njit(cache=True)
def _sorted(first: np.ndarray, table: RequestTable) -> np.ndarray:
    """Rows by ``first``, then by arrival, then in table order."""
    by_arrival = np.argsort(table["arrival_s"], kind="mergesort")
    return by_arrival[np.argsort(first[by_arrival], kind="mergesort")]


@njit(cache=True)
def form_arrival_order(
    engine: EngineModel, table: RequestTable, now_s: float, tokens_out: np.ndarray
) -> tuple[float, np.ndarray]:
    """vLLM's own order: running requests, then newcomers, each by arrival; objectives are ignored."""
    first = np.zeros(len(table))
    for i in range(len(table)):
        first[i] = 0.0 if table[i]["running"] else 1.0
    return run_in_order(engine, table, _sorted(first, table), True, tokens_out)


@njit(cache=True)
def form_decode_first(
    engine: EngineModel, table: RequestTable, now_s: float, tokens_out: np.ndarray
) -> tuple[float, np.ndarray]:
    """Sarathi-Serve: all decodes, then prompts under way, then newcomers, by arrival; objectives are ignored."""
    first = np.zeros(len(table))
    for i in range(len(table)):
        first[i] = 0.0 if is_decode(table[i]) else 1.0 if table[i]["running"] else 2.0
    return run_in_order(engine, table, _sorted(first, table), True, tokens_out)


@njit(cache=True)
def form_earliest_deadline_first(
    engine: EngineModel, table: RequestTable, now_s: float, tokens_out: np.ndarray
) -> tuple[float, np.ndarray]:
    """By the deadline of the next token, attainable or not; best effort last."""
    first = np.zeros(len(table))
    for i in range(len(table)):
        first[i] = next_token_deadline_s(table[i], now_s)
    return run_in_order(engine, table, _sorted(first, table), False, tokens_out)


@njit(cache=True)
def form_shortest_job_first(
    engine: EngineModel, table: RequestTable, now_s: float, tokens_out: np.ndarray
) -> tuple[float, np.ndarray]:
    """By the predicted seconds of work left, each request taken alone; best effort last."""
    coef = engine.coef
    first = np.zeros(len(table))
    for i in range(len(table)):
        row = table[i]
        alone = np.zeros(5)
        add_tokens(row, num_uncomputed_tokens(row), alone)
        step = np.array([1.0, row["computed_tokens"] + num_uncomputed_tokens(row), 0.0, 1.0, 0.0])
        work_s = composition_s(coef, alone) + (remaining_tokens(row) - 1) * composition_s(coef, step)
        first[i] = math.inf if row["best_effort"] else work_s
    return run_in_order(engine, table, _sorted(first, table), False, tokens_out)


@njit(cache=True)
def form_whole_prompts(
    engine: EngineModel, table: RequestTable, now_s: float, tokens_out: np.ndarray
) -> tuple[float, np.ndarray]:
    """vLLM without chunked prefill: as many whole waiting prompts as fit the budget, decodes only where none waits."""
    prompts = np.empty(len(table), dtype=np.int64)
    count, left = 0, engine.limits["max_batch_tokens"]
    for i in np.argsort(table["arrival_s"].copy(), kind="mergesort"):
        todo = num_uncomputed_tokens(table[i])
        if todo <= 0 or is_decode(table[i]):
            continue
        if count > 0 and todo > left:
            break
        prompts[count] = i
        count, left = count + 1, left - todo
    if count > 0:
        seconds, composition = run_in_order(engine, table, prompts[:count], True, tokens_out)
        if seconds > 0.0:
            return seconds, composition
    return form_arrival_order(engine, table, now_s, tokens_out)
