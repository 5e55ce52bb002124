"""Chunks of a replica that only prefills (PolyServe section 4.7): the last chunk of a prompt joins the one before it.

A prompt just over the budget then does not wait for one more iteration. The budget is half of ``max_batch_tokens``, so
that a merged chunk stays within the engine's own limit.
"""

import numpy as np
from numba import njit

from planning.batch.composition import TOKENS, add_tokens, composition_s
from planning.batch.kv import FREE_KV, FREE_SEQUENCES, empty_engine, held_kv_tokens, reserve
from planning.batch.policy import policy
from planning.deadlines import next_token_deadline_s, num_uncomputed_tokens
from planning.engine import EngineModel
from planning.order import order_of
from planning.tables import RequestTable


@njit(cache=True)
def chunk_within(left_tokens: int, batch_tokens: int, budget_tokens: int) -> int:
    """Dynamic chunk of a prompt with ``left_tokens`` beside ``batch_tokens``: all of it below twice the budget."""
    if batch_tokens >= budget_tokens:
        return 0
    if batch_tokens + left_tokens < 2 * budget_tokens:
        return left_tokens
    return budget_tokens - batch_tokens


@njit(cache=True)
def prefills_only(table: RequestTable) -> bool:
    """Whether there is work and all of it ends with its first token."""
    has_work = False
    for i in range(len(table)):
        if num_uncomputed_tokens(table[i]) > 0:
            if table[i]["output_cap_tokens"] > 1:
                return False
            has_work = True
    return has_work


@njit(cache=True)
def chunk_budget_tokens(table: RequestTable, limits: np.void) -> int:
    """Budget of ``chunk_within`` for a batch of these requests; without dynamic chunks it is ``max_batch_tokens``."""
    most = limits["max_batch_tokens"]
    return max(1, most // 2) if prefills_only(table) else most


@policy("prefill", is_live=False)
def form_prefill_batch(
    engine: EngineModel, table: RequestTable, now_s: float, tokens_out: np.ndarray
) -> tuple[float, np.ndarray]:
    """An iteration of a prefill replica: prompts by deadline in dynamic chunks; see ``form_batch`` for the arguments.

    The budget is half of ``max_batch_tokens``, so that a merged last chunk stays within the engine's own limit.
    """
    coef, limits = engine.coef, engine.limits
    budget, composition, free = limits["max_batch_tokens"] // 2, np.zeros(5), np.zeros(2, np.int64)
    empty_engine(limits, free)
    due_s = np.empty(len(table))
    for i in range(len(table)):
        due_s[i] = next_token_deadline_s(table[i], now_s)
        tokens_out[i] = 0
        if table[i]["running"]:
            free[FREE_KV] -= held_kv_tokens(table[i], limits["block_tokens"])
            free[FREE_SEQUENCES] -= 1
    for i in order_of(due_s):
        row = table[i]
        chunk = chunk_within(max(0, num_uncomputed_tokens(row)), int(composition[TOKENS]), budget)
        if chunk > 0 and reserve(row, chunk, limits["block_tokens"], free):
            tokens_out[i] = chunk
            add_tokens(row, chunk, composition)
    return composition_s(coef, composition), composition
