"""The class of a request in one iteration: decode or prefill; in time, late or best effort."""

import math
from typing import Any

import numpy as np
from numba import njit

from planning.deadlines import next_token_deadline_s, num_uncomputed_tokens
from planning.engine import EngineModel
from planning.tables import RequestTable
from profiles.kernels import LINES, Coefficients, attention_pairs, attention_s, iteration_s, overhead_s, roofline

# Numpy's integers: numba compiles a function anew for every plain constant that it is called with.
_CODES: Any = np.arange(7)
# Most entitled first.
DECODE, PREFILL, LATE_DECODE, LATE_PREFILL, BEST_EFFORT_DECODE, BEST_EFFORT_PREFILL, IDLE = _CODES


@njit(cache=True)
def decode_step_s(coef: Coefficients, row: np.void, tokens: float) -> float:
    """Seconds of an iteration with this decode alone that computes ``tokens``: one, and drafts."""
    return iteration_s(coef, tokens, row["computed_tokens"] + tokens, 0.0, 1.0, tokens - 1.0)


@njit(cache=True)
def decode_s(coef: Coefficients, row: np.void) -> float:
    """Seconds of an iteration with this decode alone: the least in which its next token can come."""
    return decode_step_s(coef, row, 1.0 + row["spec_tokens"])


@njit(cache=True)
def prefill_s(coef: Coefficients, limits: np.void, row: np.void) -> float:
    """Least seconds until the first token, with the engine to itself and chunks as large as it allows."""
    todo, seconds = num_uncomputed_tokens(row), 0.0
    pairs = attention_pairs(todo, row["computed_tokens"])
    chunks = math.ceil(todo / limits["max_batch_tokens"])
    chunks = max(
        chunks,
        math.ceil(iteration_s(coef, todo, 0.0, pairs, 1.0, 0.0) / limits["max_iteration_s"] - 1e-9),
    )
    for line in range(LINES):
        slope, base = roofline(coef, line)
        seconds = max(seconds, slope * todo + base * chunks)
    return seconds + attention_s(coef, pairs) + overhead_s(coef, chunks)


@njit(cache=True)
def is_decode(row: np.void) -> bool:
    """Whether the request's next iteration is a decode step (or the last token of a prompt: the same work)."""
    return row["running"] and num_uncomputed_tokens(row) == 1


@njit(cache=True)
def classify(coef: Coefficients, limits: np.void, row: np.void, slack_s: float) -> int:
    """How the request takes part; late means that not even the whole engine could meet its next deadline."""
    if num_uncomputed_tokens(row) <= 0:
        return IDLE
    decodes = is_decode(row)
    if row["best_effort"]:
        return BEST_EFFORT_DECODE if decodes else BEST_EFFORT_PREFILL
    if slack_s == math.inf:
        return DECODE if decodes else PREFILL
    if decodes:
        return DECODE if slack_s >= decode_s(coef, row) else LATE_DECODE
    return PREFILL if slack_s >= prefill_s(coef, limits, row) else LATE_PREFILL


@njit(cache=True)
def find_late(engine: EngineModel, table: RequestTable, now_s: float) -> np.ndarray:
    """Whether each request's next token will miss its deadline even with the whole engine (bool[rows])."""
    coef, limits = engine.coef, engine.limits
    late = np.zeros(len(table), dtype=np.bool_)
    for i in range(len(table)):
        request_class = classify(coef, limits, table[i], next_token_deadline_s(table[i], now_s) - now_s)
        late[i] = request_class in (LATE_DECODE, LATE_PREFILL)
    return late


@njit(cache=True)
def spare_s(engine: EngineModel, table: RequestTable, now_s: float) -> np.ndarray:
    """What is left of each request's time until its next deadline if it had the whole engine (f8[rows]); not below 0,
    inf for best effort."""
    spare = np.empty(len(table))
    for i in range(len(table)):
        own_s = (
            decode_s(engine.coef, table[i]) if is_decode(table[i]) else prefill_s(engine.coef, engine.limits, table[i])
        )
        spare[i] = max(0.0, next_token_deadline_s(table[i], now_s) - now_s - own_s)
    return spare
