"""KV room for outputs that become longer than expected: promises count expected lengths, room must be safe."""

import math

import numpy as np
from numba import njit

from planning.batch.classes import is_decode
from planning.deadlines import most_remaining_tokens, remaining_tokens
from planning.limits import FULL_RESERVE, NO_RESERVE
from planning.tables import RequestTable


@njit(cache=True)
def surplus_tokens(row: np.void) -> int:
    """By how many tokens the request's output may exceed what is expected, within its bound."""
    return most_remaining_tokens(row) - remaining_tokens(row)


@njit(cache=True)
def kv_reserve_tokens(table: RequestTable, reserve: int) -> float:
    """KV tokens to keep free beside the forecast peak for the decodes of ``table``; ``reserve`` as in ``LIMITS``.

    Each bound is kept with its own coverage. All of them at once (the sum) are far rarer than that: independent
    surpluses add up like standard deviations, by the root of their summed squares (pooled).
    """
    if reserve == NO_RESERVE:
        return 0.0
    total, squares = 0.0, 0.0
    for i in range(len(table)):
        if is_decode(table[i]):
            surplus = float(surplus_tokens(table[i]))
            total += surplus
            squares += surplus * surplus
    return total if reserve == FULL_RESERVE else math.sqrt(squares)
