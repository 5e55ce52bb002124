"""Whether some of a fleet's replicas could promise a request, without its being placed there."""

import numpy as np
from numba import njit

from planning.admission.search import ADMITTED
from routing.fleet_state import FleetState, engine_of
from routing.placement import check_replica, tier_distance
from routing.quick_check import quick_check


@njit(cache=True)
def fits_any(fleet: FleetState, slots: np.ndarray, row: np.void, most: int, now_s: float) -> bool:
    """Whether one of these replicas (i8[k]) could promise the request; ``most`` of them are checked exactly."""
    for r in slots:
        replica = fleet.replicas[r]
        if most <= 0 or tier_distance(replica["tier"], row["tier"]) < 0 or replica["count"] >= fleet.tables.shape[1]:
            continue
        if quick_check(engine_of(fleet, r), replica, row, now_s) == ADMITTED:
            most -= 1
            if check_replica(fleet, r, row, now_s) == ADMITTED:
                return True
    return False
