"""Where a request without an objective goes: the replica on which it has the least to wait for. Kernels."""

import numpy as np
from numba import njit

from routing.fleet_state import FleetState
from routing.placement import NOWHERE


@njit(cache=True)
def best_effort_places(fleet: FleetState, backlog: float) -> np.ndarray:
    """How many more requests without an objective each replica takes (i8[R]): it holds ``backlog`` per sequence."""
    places = np.zeros(len(fleet.replicas), dtype=np.int64)
    for r in range(len(places)):
        replica = fleet.replicas[r]
        if replica["is_open"]:
            places[r] = max(0.0, np.ceil(backlog * fleet.limits[r]["max_running"]) - replica["best_effort"])
    return places


@njit(cache=True)
def idlest_open(fleet: FleetState, held_tokens: np.ndarray, scores: np.ndarray, is_usable: np.ndarray) -> int:
    """The open replica of the usable ones (bool[R]) with the fewest prompt tokens ahead, then the fewest requests, then
    the lowest tier, then the lowest slot; ``NOWHERE`` where there is none.

    ``held_tokens`` (f8[R], or empty) of its own prompt need not be computed there; ``scores`` (f8[R], or empty) say
    -inf for never.
    """
    best, best_ahead = NOWHERE, 0.0
    for r in range(len(fleet.replicas)):
        replica = fleet.replicas[r]
        if not (replica["is_open"] and is_usable[r]) or (len(scores) and scores[r] == -np.inf):
            continue
        ahead = replica["backlog_tokens"] - (held_tokens[r] if len(held_tokens) else 0.0)
        is_better = best == NOWHERE or ahead < best_ahead
        if not is_better and ahead == best_ahead:
            other = fleet.replicas[best]
            is_better = replica["count"] < other["count"]
            if replica["count"] == other["count"]:
                is_better = replica["tier"] < other["tier"]
        if is_better:
            best, best_ahead = r, ahead
    return best
