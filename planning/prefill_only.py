"""Chunks of a replica that only prefills (PolyServe section 4.7): the last chunk of a prompt joins the one before it.

A prompt just over the budget then does not wait for one more iteration. The budget is half of ``max_batch_tokens``, so
that a merged chunk stays within the engine's own limit.
"""

import numpy as np
from numba import njit

from planning.deadlines import todo_tokens


@njit(cache=True)
def chunk_within(left_tokens: int, batch_tokens: int, budget_tokens: int) -> int:
    """Dynamic chunk of a prompt with ``left_tokens`` beside ``batch_tokens``: all of it below twice the budget."""
    if batch_tokens >= budget_tokens:
        return 0
    if batch_tokens + left_tokens < 2 * budget_tokens:
        return left_tokens
    return budget_tokens - batch_tokens


@njit(cache=True)
def prefills_only(table: np.ndarray) -> bool:
    """Whether there is work and all of it ends with its first token."""
    has_work = False
    for i in range(len(table)):
        if todo_tokens(table[i]) > 0:
            if table[i]["output_cap_tokens"] > 1:
                return False
            has_work = True
    return has_work


@njit(cache=True)
def chunk_budget_tokens(table: np.ndarray, limits: np.void) -> int:
    """Budget of ``chunk_within`` for a batch of these requests; without dynamic chunks it is ``max_batch_tokens``."""
    most = limits["max_batch_tokens"]
    return max(1, most // 2) if prefills_only(table) else most
