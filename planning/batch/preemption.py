"""Who gives up its KV cache to a more entitled request: those that lose least by it. Pure.

Classes keep their order: best effort yields first, then late requests, then those that stay on time all the same. Who
was preempted before and has not made ``HOLD_TOKENS`` since comes after the others of its class. Among equals, those
are chosen that together hold enough and have least to compute again, weighted by what they are worth, for the time that
they would go on to hold it.
"""

import math

import numpy as np
from numba import njit

from planning.batch.kv import held_kv_tokens
from planning.deadlines import remaining_tokens
from planning.order import integers, numbers, order_of, order_of_integers
from planning.tables import RequestTable
from profiles.kernels import Coefficients, attention_pairs, attention_s, token_s

HOLD_TOKENS = 32  # that a request which lost its KV cache may make before it is one of the first to lose it again
LEAST_VALUE = 1e-3  # what computing again costs the engine is never nothing, whatever a request is worth

# Who yields first has the highest; 2 and more of late requests and best effort, in pairs.
NEVER, WOULD_MISS, ON_TIME_STILL, LATE_HELD, LATE, BEST_EFFORT_HELD, BEST_EFFORT = range(-1, 6)


@njit(cache=True)
def recompute_s(coef: Coefficients, row: np.void) -> float:
    """Seconds by which large batches grow when the request's tokens have to be computed once more."""
    tokens = row["computed_tokens"]
    return token_s(coef) * tokens + attention_s(coef, attention_pairs(tokens, 0.0))


@njit(cache=True)
def loss(coef: Coefficients, row: np.void) -> float:
    """What it costs that the request yields, per token it has left: who ends soon gives its room back by itself."""
    return max(row["value"], LEAST_VALUE) * recompute_s(coef, row) / remaining_tokens(row)


@njit(cache=True)
def is_held(row: np.void) -> bool:
    """Whether the request has lost its KV cache and not made ``HOLD_TOKENS`` since."""
    return row["preempted_at"] > 0 and row["emitted_tokens"] + 1 - row["preempted_at"] < HOLD_TOKENS


@njit(cache=True)
def note_preempted(row: np.void) -> None:
    """The request loses its KV cache; its tokens are kept, to be computed again."""
    row["preempted_at"] = row["emitted_tokens"] + 1
    row["running"], row["computed_tokens"] = False, 0


@njit(cache=True)
def _by_price(table: RequestTable, rows: np.ndarray, sizes: np.ndarray, losses: np.ndarray) -> np.ndarray:
    """Places in ``rows``, cheapest per KV token first; ties by latest arrival, then by id."""
    arrivals, ids, prices = numbers(table["arrival_s"][rows]), integers(table["id"][rows]), losses / sizes
    order = order_of_integers(-ids)
    order = order[order_of(-arrivals[order])]
    return order[order_of(prices[order])]


@njit(cache=True)
def cover(order: np.ndarray, sizes: np.ndarray, losses: np.ndarray, need: int) -> np.ndarray:
    """Which of those (bool[n]), that hold ``sizes`` and lose ``losses``, together hold ``need`` at little loss.

    ``order`` is by loss per size. At most twice the least loss (Gens and Levner's greedy for minimum knapsack): whoever
    completes the need is tried as the last one of those before it that are too small. Nobody of them is there in vain.
    """
    chosen = np.zeros(len(sizes), dtype=np.bool_)
    held, lost, least, last, count = 0, 0.0, math.inf, -1, 0
    for place in range(len(order)):
        at = order[place]
        if held + sizes[at] < need:
            held, lost = held + sizes[at], lost + losses[at]
        elif lost + losses[at] < least:
            least, last, count = lost + losses[at], at, place
    held = 0
    for place in range(count):
        at = order[place]
        if held + sizes[at] < need:
            chosen[at], held = True, held + sizes[at]
    chosen[last], held = True, held + sizes[last]
    for place in range(count - 1, -1, -1):
        at = order[place]
        if chosen[at] and held - sizes[at] >= need:
            chosen[at], held = False, held - sizes[at]
    return chosen


@njit(cache=True)
def choose_victims(
    coef: Coefficients, table: RequestTable, levels: np.ndarray, block_tokens: int, kv_tokens: int, sequences: int
) -> np.ndarray:
    """Rows of those that yield so that ``kv_tokens`` and ``sequences`` come free; all may, if they hold too little.

    ``levels`` (i8[rows]) are the constants above, ``NEVER`` for who may not yield. A higher level yields as a whole
    before a lower one is touched.
    """
    victims, count = np.empty(len(table), dtype=np.int64), 0
    for level in range(BEST_EFFORT, NEVER, -1):
        rows = np.flatnonzero(levels == level)
        if len(rows) == 0 or (kv_tokens <= 0 and sequences <= 0):
            continue
        sizes, losses = np.empty(len(rows), dtype=np.int64), np.empty(len(rows))
        for k in range(len(rows)):
            row = table[rows[k]]
            sizes[k] = held_kv_tokens(row, block_tokens)
            losses[k] = loss(coef, row)
        chosen = np.ones(len(rows), dtype=np.bool_)
        if sizes.sum() >= kv_tokens and len(rows) >= sequences:
            chosen = cover(_by_price(table, rows, sizes, losses), sizes, losses, max(1, kv_tokens))
        for k in range(len(rows)):
            if chosen[k]:
                victims[count] = rows[k]
                count, kv_tokens, sequences = count + 1, kv_tokens - sizes[k], sequences - 1
    return victims[:count]
