"""When a request that is refused now would be attainable: what a client is told to wait."""

import math

import numpy as np
from numba import njit

from planning.choice import ADMITTED, why_unattainable
from planning.rollout import OUTLOOK, TOLERANCE_S, leave, rollout


@njit(cache=True)
def table_at(table: np.ndarray, outlook: np.ndarray, at_s: float) -> np.ndarray:
    """The promised requests as their outlook has them at ``at_s``, by which every prefill under way counts as done."""
    later = table.copy()
    for i in range(len(later)):
        row, seen = later[i], outlook[i]
        if seen["first_s"] == math.inf:
            leave(row)  # best effort and late work yields
            continue
        steps = (at_s - seen["first_s"]) / seen["tpot_s"] if seen["tpot_s"] > 0.0 else math.inf
        emitted = row["emitted_tokens"] + 1 + max(0.0, steps)
        if emitted >= row["output_tokens"]:
            leave(row)
        else:
            row["emitted_tokens"] = int(emitted)
            row["computed_tokens"], row["running"] = row["prompt_tokens"] + row["emitted_tokens"] - 1, True
    return later


@njit(cache=True)
def _is_attainable_at(
    coef: np.ndarray, limits: np.void, table: np.ndarray, outlook: np.ndarray, new: np.ndarray, at_s: float
) -> bool:
    """Whether the request could be promised if it arrived at ``at_s``."""
    both = np.concatenate((table_at(table, outlook, at_s), new))
    row = both[-1]
    row["deadline_s"] += at_s - row["arrival_s"]
    row["arrival_s"] = at_s
    seen = np.zeros(len(both), dtype=OUTLOOK)
    seen["doomed"][: len(table)] = outlook["doomed"]
    worst_s, peak_tokens = rollout(coef, both, at_s, limits, -TOLERANCE_S, seen)
    return why_unattainable(row, seen[len(table)], worst_s, peak_tokens, limits) == ADMITTED


@njit(cache=True)
def earliest_attainable_s(
    coef: np.ndarray,
    limits: np.void,
    table: np.ndarray,
    outlook: np.ndarray,
    new: np.ndarray,
    start_s: float,
    horizon_s: float,
) -> float:
    """Earliest departure of a promised request at which ``new`` (one row) could be promised, arriving then.

    ``outlook`` is that of ``table`` without the request. Bisects over the departures, because room only grows with
    them; ``inf`` when it would not do within ``horizon_s``, or not even on an idle engine.
    """
    ends_s = np.sort(outlook["finish_s"])
    ends_s = ends_s[ends_s <= start_s + horizon_s]
    if len(ends_s) == 0 or not _is_attainable_at(coef, limits, table, outlook, new, ends_s[-1]):
        return math.inf
    low, high = 0, len(ends_s) - 1
    while low < high:
        middle = (low + high) // 2
        if _is_attainable_at(coef, limits, table, outlook, new, ends_s[middle]):
            high = middle
        else:
            low = middle + 1
    return float(ends_s[high])
