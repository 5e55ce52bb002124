"""Room on decode replicas that is kept for requests whose prompts are being computed elsewhere. Pure.

A reservation is the request's row as its decode will be. The rows lie in the mirrors only while the fleet decides, so
that quick checks and forecasts count them like any promise, and neither reports nor time touch them in between.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from controller.mirror.slots import ReplicaSlots

GRACE_S = 3.0  # between the end of a prefill, as reports show it, and the question who decodes


@dataclass
class Reservation:
    """One request's room."""

    replica: str
    slot: int
    row: np.ndarray  # REQUEST[]
    needed_s: float  # when its prefill was last known to be under way


@dataclass
class DecodeRoom:
    """Reservations by the uid of their request; a request has one at most."""

    held: dict[int, Reservation] = field(default_factory=dict)

    @contextmanager
    def counted(self, slots: ReplicaSlots) -> Iterator[None]:
        """Have the rows of all reservations in the slots, those made meanwhile included; afterwards none."""
        for reservation in self.held.values():
            slots.add(reservation.slot, reservation.row)
        try:
            yield
        finally:
            kept = defaultdict[int, list[int]](list)  # a request's prompt may be computed where others have room
            for uid, reservation in self.held.items():
                kept[reservation.slot].append(uid)
            for slot, uids in kept.items():
                rows = slots.rows(slot)
                slots.put(slot, rows[~np.isin(rows["id"], uids)].copy())

    def reserve(self, slots: ReplicaSlots, uid: int, reservation: Reservation) -> None:
        """Keep room; inside ``counted``."""
        self.held[uid] = reservation
        slots.add(reservation.slot, reservation.row)

    def release(self, slots: ReplicaSlots, uid: int) -> Reservation | None:
        """Give room up, and return what was kept; inside ``counted``."""
        reservation = self.held.pop(uid, None)
        if reservation is not None:
            slots.remove(reservation.slot, uid)
        return reservation

    def forget(self, uid: int) -> None:
        """The request has ended; outside of ``counted``."""
        self.held.pop(uid, None)

    def drop(self, replica: str) -> None:
        """A replica is gone or reborn; outside of ``counted``."""
        self.held = {uid: r for uid, r in self.held.items() if r.replica != replica}

    def expire(self, replicas: Iterable[str], is_known: Callable[[int], bool], now_s: float) -> None:
        """Drop what is kept on others than these ``replicas``, and for requests that nobody has known for long."""
        usable = set(replicas)
        for reservation in (r for uid, r in self.held.items() if is_known(uid)):
            reservation.needed_s = now_s
        self.held = {uid: r for uid, r in self.held.items() if r.replica in usable and now_s - r.needed_s <= GRACE_S}

    def counts(self, tiers: int) -> dict[str, list[int]]:
        """Reservations of each replica that has any, by position of the first ``tiers`` tiers."""
        counts = dict[str, list[int]]()
        for reservation in self.held.values():
            if reservation.row["tier"] < tiers:
                counts.setdefault(reservation.replica, [0] * tiers)[max(0, int(reservation.row["tier"]))] += 1
        return counts

    def remap_tiers(self, tier_remap: np.ndarray) -> None:
        """Tell requests their tiers in another table (``TierTable.tier_remap``)."""
        for reservation in self.held.values():
            reservation.row["tier"] = tier_remap[reservation.row["tier"]]
