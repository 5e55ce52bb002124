"""The dynamic program (DP) that chooses whom to admit (SLOs-Serve section 3.2.1, appendix C).

Requests are taken by prefill deadline. For every number of accepted requests per TPOT level, KV units and value units,
``budget`` is the most prefill tokens that can be to spare at the current deadline: pb[i, m, n_1 .. n_L]. With equal
values the counts are the objective and the value axis has length one.
"""

import math

import numpy as np
from numba import float64, from_dtype, int64, njit, types

from planning.admission.demand import prefill_budget_tokens
from profiles.compiled_once import compiled_once
from profiles.kernels import Coefficients

# One request in the order of prefill deadlines.
ITEM = np.dtype(
    [
        ("is_forced", "?"),  # promised already
        ("cost_tokens", "f8"),
        ("level", "i8"),  # position in the table of TPOT levels
        ("kv_units", "i8"),
        ("value_units", "i8"),
    ]
)
ITEM_TYPE = from_dtype(ITEM)
MAX_CHOICES = 62  # optional requests per DP: bits of the set that a state remembers


@njit(cache=True)
def _decode_counts(state: int, sizes: np.ndarray, counts: np.ndarray) -> None:
    """Accepted requests per level of a state; the level axes come first and vary fastest."""
    for level in range(len(counts)):
        counts[level] = state % sizes[level]
        state //= sizes[level]


@njit(cache=True)
def _sizes(items: np.ndarray, levels: int, kv_units: int) -> np.ndarray:
    """Lengths of the axes: one count per level, KV units, value units."""
    sizes = np.ones(levels + 2, dtype=np.int64)
    sizes[levels] = kv_units + 1
    for i in range(len(items)):
        if not items[i]["is_forced"]:
            sizes[items[i]["level"]] += 1
            sizes[levels + 1] += items[i]["value_units"]
    return sizes


@njit(cache=True)
def _accrue(
    coef: Coefficients,
    span: np.void,
    levels: np.ndarray,
    longest_s: float,
    sizes: np.ndarray,
    budget: np.ndarray,
) -> None:
    """Add the prefill budget of one interval to every state; a state that cannot keep its decodes' pace dies.

    Not even the empty set may be able to: then nothing new may make it worse, but what was promised stays promised.
    """
    counts, per_count = np.zeros(len(levels), dtype=np.int64), 1
    for level in range(len(levels)):
        per_count *= sizes[level]
    for base in range(per_count):
        _decode_counts(base, sizes, counts)
        gain = prefill_budget_tokens(coef, span, levels, counts, longest_s)
        for state in range(base, len(budget), per_count):
            if budget[state] > -math.inf:
                budget[state] += gain


@njit(cache=True)
def _drop_overdrawn(budget: np.ndarray) -> None:
    """Drop the states whose budget is overdrawn, beyond what the promises alone overdraw it."""
    floor = min(0.0, budget[0]) - 1e-9
    for state in range(1, len(budget)):
        if budget[state] < floor:
            budget[state] = -math.inf


@compiled_once(types.void(ITEM_TYPE, int64, int64[::1], int64[::1], float64[::1], int64[::1]))
def _accept(
    item: np.void, bit: int, sizes: np.ndarray, strides: np.ndarray, budget: np.ndarray, chosen: np.ndarray
) -> None:
    """Let every state also take the item; of two ways to the same state the one with more budget stays."""
    levels = len(sizes) - 2
    step = strides[item["level"]] + item["kv_units"] * strides[levels] + item["value_units"] * strides[levels + 1]
    floor = min(0.0, budget[0]) - 1e-9
    for state in range(len(budget) - 1 - step, -1, -1):
        count = state // strides[item["level"]] % sizes[item["level"]]
        kv_units = state // strides[levels] % sizes[levels]
        if count + 1 >= sizes[item["level"]] or kv_units + item["kv_units"] >= sizes[levels]:
            continue
        left = budget[state] - item["cost_tokens"]
        if left >= floor and left > budget[state + step]:
            budget[state + step] = left
            chosen[state + step] = chosen[state] | (1 << bit)


@njit(cache=True)
def choose_set(
    coef: Coefficients,
    items: np.ndarray,
    spans: np.ndarray,
    levels: np.ndarray,
    longest_s: float,
    kv_units: int,
) -> int:
    """The set of optional ``items`` of greatest value, as bits in the order of optional items.

    ``items`` (ITEM) come by prefill deadline and ``spans`` (DEMAND) are the intervals that end at their deadlines; more
    spans than items extend the horizon. Ties go to the set that leaves the most budget.
    """
    sizes = _sizes(items, len(levels), kv_units)
    strides = np.ones(len(sizes), dtype=np.int64)
    for axis in range(1, len(sizes)):
        strides[axis] = strides[axis - 1] * sizes[axis - 1]
    budget = np.full(strides[-1] * sizes[-1], -math.inf)
    chosen = np.zeros(len(budget), dtype=np.int64)
    budget[0], bit = 0.0, 0
    for j in range(len(spans)):
        _accrue(coef, spans[j], levels, longest_s, sizes, budget)
        if j < len(items) and items[j]["is_forced"]:
            budget -= items[j]["cost_tokens"]
        _drop_overdrawn(budget)
        if j < len(items) and not items[j]["is_forced"]:
            _accept(items[j], bit, sizes, strides, budget, chosen)
            bit += 1
    return _best(sizes, strides, budget, chosen)


@njit(cache=True)
def _best(sizes: np.ndarray, strides: np.ndarray, budget: np.ndarray, chosen: np.ndarray) -> int:
    """The set of the state with most value units, or most requests where all values are equal; ties by budget."""
    levels, best, best_worth = len(sizes) - 2, 0, -1
    for state in range(len(budget)):
        if budget[state] == -math.inf:
            continue
        worth = state // strides[levels + 1]
        if sizes[levels + 1] == 1:
            for level in range(levels):
                worth += state // strides[level] % sizes[level]
        if worth > best_worth or (worth == best_worth and budget[state] > budget[best]):
            best, best_worth = state, worth
    return chosen[best]
