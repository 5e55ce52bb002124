"""What roles and sizes of the fleet are decided by, read from all mirrors at once. Pure."""

from collections.abc import Mapping

import numpy as np
from numba import njit

from controller.mirror.replica_model import VirtualReplica
from controller.mirror.slots import ReplicaSlots
from controller.scaling.role import ReplicaView
from routing.fleet_state import FleetState


@njit(cache=True)
def count_by_tier(fleet: FleetState, tiers: int) -> np.ndarray:
    """Requests with an objective that each replica holds of each of the first ``tiers`` tiers (i8[R, tiers])."""
    counts = np.zeros((len(fleet.replicas), tiers), dtype=np.int64)
    for r in range(len(fleet.replicas)):
        for i in range(fleet.replicas[r]["count"]):
            row = fleet.tables[r, i]
            if not row["best_effort"] and row["tier"] < tiers:
                counts[r, max(0, row["tier"])] += 1
    return counts


def views_of(
    replicas: Mapping[str, VirtualReplica], slots: ReplicaSlots, tiers: int, are_live: np.ndarray
) -> list[ReplicaView]:
    """Views in order of names; the first ``tiers`` have an objective, ``are_live`` is by slot."""
    names, state = sorted(replicas), slots.fleet_state.replicas
    where = np.array([replicas[name].slot for name in names], dtype=np.int64)
    requests = map(tuple, count_by_tier(slots.fleet_state, tiers)[where].tolist())
    reporting = are_live[where] & ~slots.liveness["draining"][where]
    columns = state["best_effort"][where].tolist(), state["load"][where].tolist(), reporting.tolist()
    return list(map(ReplicaView, names, requests, *columns))
