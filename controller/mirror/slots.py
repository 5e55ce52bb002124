"""The arrays that hold every replica's mirror: slots are handed out and taken back, rows grow by doubling."""

import numpy as np

from routing.fleet_state import (
    SHARED,
    FleetState,
    add_request,
    make_fleet_state,
    recompute_load,
    remove_request,
    resized,
)


class ReplicaSlots:
    """Owner of ``FleetState``. Its arrays move when they grow: ask for them anew after every call."""

    def __init__(self, replicas: int = 4, rows: int = 64) -> None:
        self.fleet_state: FleetState = make_fleet_state(replicas, rows)
        self._free = list(range(replicas))

    def take(self) -> int:
        """A free slot, the lowest there is: closed, shared, empty."""
        known, rows = self.fleet_state.forecasts.shape
        if not self._free:
            self.fleet_state = resized(self.fleet_state, 2 * known, rows)
            self._free = list(range(known, 2 * known))
        return self._free.pop(0)

    def release(self, slot: int) -> None:
        """Close a slot and forget its rows."""
        self.fleet_state.replicas[slot] = np.zeros((), dtype=self.fleet_state.replicas.dtype)
        self.fleet_state.replicas["tier"][slot] = SHARED
        self._free = sorted([*self._free, slot])

    def rows(self, slot: int) -> np.ndarray:
        """The requests of a slot (REQUEST[count], a view)."""
        return self.fleet_state.tables[slot, : self.fleet_state.replicas["count"][slot]]

    def put(self, slot: int, table: np.ndarray) -> None:
        """Replace the requests of a slot."""
        self._make_room(len(table))
        self.fleet_state.tables[slot, : len(table)] = table
        self.fleet_state.replicas["count"][slot] = len(table)
        recompute_load(self.fleet_state, slot)

    def add(self, slot: int, row: np.ndarray) -> None:
        """Add one request."""
        self.allocate(1)
        add_request(self.fleet_state, slot, np.atleast_1d(row)[0])

    def remove(self, slot: int, uid: int) -> bool:
        """Remove a request; whether it was there."""
        return bool(remove_request(self.fleet_state, slot, uid))

    def allocate(self, rows: int) -> None:
        """See to it that every slot has room for that many more requests, and one to try with."""
        self._make_room(int(self.fleet_state.replicas["count"].max()) + rows)

    def _make_room(self, rows: int) -> None:
        replicas, known = self.fleet_state.forecasts.shape
        if rows + 1 > known:
            self.fleet_state = resized(self.fleet_state, replicas, max(2 * known, rows + 1))
