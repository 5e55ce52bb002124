"""Batch policies without a model of time: serve in a fixed order until a token budget is spent.

The usual schedulers of the field, for comparison: arrival order (vLLM), decodes first in a fixed chunk (Sarathi-Serve),
earliest deadline first, shortest job first, highest response ratio. Same signature as
``planning.batch.slo.form_batch``; the budget is ``limits["max_batch_tokens"]``.
"""

import math

import numpy as np

from planning.batch.classes import is_decode
from planning.batch.composition import add_tokens, composition_s
from planning.batch.ordered import run_by_bid, run_in_order, sorted_rows
from planning.batch.policy import policy
from planning.batch.worth import SHORTEST_S, decode_step_s, first_s, recompute_s
from planning.deadlines import dslo_due_s, num_uncomputed_tokens, remaining_tokens
from planning.engine import EngineModel
from planning.order import numbers, order_of
from planning.tables import RequestTable

BEST_EFFORT_S = 1e6  # by which best effort stands behind the others


@policy("vllm")
def form_arrival_order(
    engine: EngineModel, table: RequestTable, now_s: float, tokens_out: np.ndarray
) -> tuple[float, np.ndarray]:
    """vLLM's own order: running requests, then newcomers, each by arrival; objectives are ignored."""
    first = np.zeros(len(table))
    for i in range(len(table)):
        first[i] = 0.0 if table[i]["running"] else 1.0
    return run_in_order(engine, table, sorted_rows(first, table), True, tokens_out)


@policy("sarathi")
def form_decode_first(
    engine: EngineModel, table: RequestTable, now_s: float, tokens_out: np.ndarray
) -> tuple[float, np.ndarray]:
    """Sarathi-Serve: all decodes, then prompts under way, then newcomers, by arrival; objectives are ignored."""
    first = np.zeros(len(table))
    for i in range(len(table)):
        first[i] = 0.0 if is_decode(table[i]) else 1.0 if table[i]["running"] else 2.0
    return run_in_order(engine, table, sorted_rows(first, table), True, tokens_out)


@policy("edf")
def form_earliest_deadline_first(
    engine: EngineModel, table: RequestTable, now_s: float, tokens_out: np.ndarray
) -> tuple[float, np.ndarray]:
    """By the deadline of the next token, or of the whole request, attainable or not; best effort last."""
    first = np.zeros(len(table))
    for i in range(len(table)):
        first[i] = math.inf if table[i]["best_effort"] else min(dslo_due_s(table[i], now_s), table[i]["deadline_s"])
    return run_in_order(engine, table, sorted_rows(first, table), False, tokens_out)


@policy("sjf")
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
    return run_in_order(engine, table, sorted_rows(first, table), False, tokens_out)


@policy("vllm-whole", is_live=False)
def form_whole_prompts(
    engine: EngineModel, table: RequestTable, now_s: float, tokens_out: np.ndarray
) -> tuple[float, np.ndarray]:
    """vLLM without chunked prefill: as many whole waiting prompts as fit the budget, decodes only where none waits."""
    prompts = np.empty(len(table), dtype=np.int64)
    count, left = 0, engine.limits["max_batch_tokens"]
    for i in order_of(numbers(table["arrival_s"])):
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


@policy("srpt", is_live=False, needs_lengths=True)
def form_shortest_remaining_first(
    engine: EngineModel, table: RequestTable, now_s: float, tokens_out: np.ndarray
) -> tuple[float, np.ndarray]:
    """SRPT: least time left first; a newcomer takes a place if it saves more than the other's recompute costs.

    It is what its name says where lengths are true, as in simulations.
    """
    rests, costs, step_s = np.empty(len(table)), np.empty(len(table)), decode_step_s(engine, table)
    for i in range(len(table)):
        rests[i] = first_s(engine, table[i], step_s) + (remaining_tokens(table[i]) - 1) * step_s
        if table[i]["best_effort"]:
            rests[i] += BEST_EFFORT_S
        costs[i] = recompute_s(engine, table[i]) - rests[i]
    return run_by_bid(engine, table, sorted_rows(rests, table), (-rests, costs), True, tokens_out)


@policy("hrrn")
def form_highest_response_ratio(
    engine: EngineModel, table: RequestTable, now_s: float, tokens_out: np.ndarray
) -> tuple[float, np.ndarray]:
    """HRRN (Brinch Hansen, 1971) without predictions: newcomers by age over the time that their prompt takes.

    Those that run are never interrupted.
    """
    first, nobody = np.empty(len(table)), np.full(len(table), math.inf)
    for i in range(len(table)):
        row = table[i]
        first[i] = -(now_s - row["arrival_s"]) / first_s(engine, row, SHORTEST_S)
        if row["running"]:
            first[i] = -math.inf
    return run_by_bid(engine, table, sorted_rows(first, table), (-nobody, nobody), True, tokens_out)
