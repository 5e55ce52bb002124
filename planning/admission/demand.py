"""What decoding demands of the engine between two deadlines, and so the prefill budget that is left (PB*, eq. 2 and 3).

Demand is counted by deadlines: a decode with earned slack asks for nothing until its next token is due, one that will
have reached its predicted length asks for nothing more, and KV tokens grow meanwhile.
"""

import math

import numpy as np
from numba import njit

from planning.batch.classes import is_decode
from planning.deadlines import effective_tpot_s, next_token_deadline_s, num_uncomputed_tokens, remaining_tokens
from planning.engine import EngineModel
from planning.tables import RequestTable
from profiles.kernels import (
    LINES,
    Coefficients,
    attention_pairs,
    attention_s,
    iteration_s,
    kv_read_s,
    overhead_s,
    roofline,
    token_s,
)

# Demand of requests already promised within one interval.
DEMAND = np.dtype(
    [
        ("length_s", "f8"),
        ("tokens", "f8"),  # decode tokens that fall due in it
        ("iterations", "f8"),  # least number of iterations, from the request with most tokens due
        ("rest_s", "f8"),  # seconds of KV reads and per-sequence overhead for those tokens
    ]
)


@njit(cache=True)
def due_tokens(row: np.void, start_s: float, by_s: float) -> float:
    """Decode tokens of the request that fall due by ``by_s``, as a fluid, starting from its state at ``start_s``."""
    pace_s = effective_tpot_s(row, start_s)
    first_s = next_token_deadline_s(row, start_s)
    if pace_s == math.inf or first_s == math.inf:
        return 0.0
    done = 0.0 if is_decode(row) else 1.0  # a prefill emits its first token itself
    since_s = by_s - first_s + (pace_s if done == 0.0 else 0.0)
    due = max(0.0, since_s) / pace_s if pace_s > 0.0 else math.inf
    return min(due, remaining_tokens(row) - done)


@njit(cache=True)
def fill_demand(
    coef: Coefficients, promised: RequestTable, start_s: float, checkpoints_s: np.ndarray, demand: np.ndarray
) -> None:
    """Fill in ``demand`` (DEMAND[k]) of the ``promised`` requests between consecutive ``checkpoints_s`` (f8[k], sorted,
    after ``start_s``)."""
    before = np.zeros(len(promised))
    for j in range(len(checkpoints_s)):
        span = demand[j]
        span["length_s"] = checkpoints_s[j] - (checkpoints_s[j - 1] if j > 0 else start_s)
        span["tokens"], span["iterations"], span["rest_s"] = 0.0, 0.0, 0.0
        for i in range(len(promised)):
            row = promised[i]
            due = due_tokens(row, start_s, checkpoints_s[j])
            fresh = due - before[i]
            kv_tokens = row["prompt_tokens"] + row["emitted_tokens"] + 0.5 * (due + before[i])
            before[i] = due
            span["tokens"] += fresh
            span["iterations"] = max(span["iterations"], fresh)
            span["rest_s"] += fresh * (overhead_s(coef, 1.0) + kv_read_s(coef, kv_tokens))


@njit(cache=True)
def prefill_budget_tokens(
    coef: Coefficients, span: np.void, levels: np.ndarray, counts: np.ndarray, longest_s: float
) -> float:
    """Prefill tokens to spare within one interval (``span``, DEMAND[]) beside its demand and ``counts`` (i8[L]) more
    decodes of each level (TPOT_LEVEL[L]).

    The interval is cut into as few iterations as the tightest pace and ``longest_s`` (the executor's cap) allow: larger
    batches carry more (SLOs-Serve section 3.2.2). Negative when not even the decodes can keep their pace.
    """
    length_s = span["length_s"]
    iterations, tokens, rest_s = max(span["iterations"], length_s / longest_s), span["tokens"], span["rest_s"]
    for level in range(len(levels)):
        if counts[level] > 0:
            steps = length_s / levels[level]["tpot_s"]
            iterations = max(iterations, steps)
            tokens += counts[level] * steps
            rest_s += counts[level] * steps * (overhead_s(coef, 1.0) + kv_read_s(coef, levels[level]["kv_tokens"]))
    left_s = length_s - rest_s - overhead_s(coef, iterations)
    budget = math.inf
    for line in range(LINES):
        slope, base = roofline(coef, line)
        if slope > 0:
            budget = min(budget, (left_s - iterations * base) / slope - tokens)
        elif left_s < iterations * base:
            budget = -math.inf
    return budget


@njit(cache=True)
def longest_iteration_s(engine: EngineModel) -> float:
    """What the executor's iterations may last: its own cap, or the time of a full batch of prefill."""
    return min(
        engine.limits["max_iteration_s"],
        iteration_s(engine.coef, engine.limits["max_batch_tokens"], 0.0, 0.0, 1.0, 0.0),
    )


@njit(cache=True)
def prefill_cost_tokens(coef: Coefficients, row: np.void) -> float:
    """Prefill work of the request in tokens of budget, its attention converted at the compute-bound slope."""
    todo = 0 if is_decode(row) else max(0, num_uncomputed_tokens(row))
    slope = token_s(coef)
    extra = attention_s(coef, attention_pairs(todo, row["computed_tokens"])) / slope if slope > 0 else 0.0
    return todo + extra
