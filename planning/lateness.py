"""Which requests can no longer be on time, whatever the engine does next."""

import numpy as np
from numba import njit

from planning.deadlines import next_due_s
from planning.room import LATE_DECODE, LATE_PREFILL, kind_of


@njit(cache=True)
def find_late(coef: np.ndarray, table: np.ndarray, now_s: float, limits: np.void) -> np.ndarray:
    """Whether each request's next token will miss its deadline even with the whole engine (bool[rows])."""
    late = np.zeros(len(table), dtype=np.bool_)
    for i in range(len(table)):
        kind = kind_of(coef, table[i], limits, next_due_s(table[i], now_s) - now_s)
        late[i] = kind in (LATE_DECODE, LATE_PREFILL)
    return late
