"""The arrays that hold every replica's mirror: slots are handed out and taken back, rows grow by doubling."""

import numpy as np

from routing.mirrors import SHARED, Mirrors, commit, make_mirrors, resized, summarize, take_out


class Bank:
    """Owner of ``Mirrors``. Its arrays move when they grow: ask for them anew after every call."""

    def __init__(self, replicas: int = 4, rows: int = 64) -> None:
        self.mirrors: Mirrors = make_mirrors(replicas, rows)
        self._free = list(range(replicas))

    def take(self) -> int:
        """A free slot, the lowest there is: closed, shared, empty."""
        known, rows = self.mirrors.outlooks.shape
        if not self._free:
            self.mirrors = resized(self.mirrors, 2 * known, rows)
            self._free = list(range(known, 2 * known))
        return self._free.pop(0)

    def give_back(self, slot: int) -> None:
        """Close a slot and forget its rows."""
        self.mirrors.replicas[slot] = np.zeros((), dtype=self.mirrors.replicas.dtype)
        self.mirrors.replicas["tier"][slot] = SHARED
        self._free = sorted([*self._free, slot])

    def rows(self, slot: int) -> np.ndarray:
        """The requests of a slot (REQUEST[count], a view)."""
        return self.mirrors.tables[slot, : self.mirrors.replicas["count"][slot]]

    def put(self, slot: int, table: np.ndarray) -> None:
        """Replace the requests of a slot."""
        self._make_room(len(table))
        self.mirrors.tables[slot, : len(table)] = table
        self.mirrors.replicas["count"][slot] = len(table)
        summarize(self.mirrors, slot)

    def add(self, slot: int, row: np.ndarray) -> None:
        """Add one request."""
        self.spare(1)
        commit(self.mirrors, slot, np.atleast_1d(row)[0])

    def remove(self, slot: int, uid: int) -> bool:
        """Remove a request; whether it was there."""
        return bool(take_out(self.mirrors, slot, uid))

    def spare(self, rows: int) -> None:
        """See to it that every slot has room for that many more requests, and one to try with."""
        self._make_room(int(self.mirrors.replicas["count"].max()) + rows)

    def _make_room(self, rows: int) -> None:
        replicas, known = self.mirrors.outlooks.shape
        if rows + 1 > known:
            self.mirrors = resized(self.mirrors, replicas, max(2 * known, rows + 1))
