"""Requests that have a place and have not begun: a better set may still take it from them. Pure.

A request that would only wait in its engine's queue for long waits at its ingress instead (it is held), which asks
again shortly before the request is due to begin; the others are sent. Nothing has been told to the client of either,
so that a newcomer worth more, or as much for less work, may still have the place (SLOs-Serve section 4.1; of equal
values the shorter prompt goes first, Moore and Hodgson's rule). A held request that loses its place looks for another
at once. One that was sent is recalled: its ingress ends it there and asks anew.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from controller.chances import are_likely, plan_chances
from controller.mirror.locations import RequestLocations
from controller.mirror.prefix_affinity import NOTHING_CACHED
from controller.mirror.replica_model import VirtualReplica
from controller.mirror.slots import ReplicaSlots
from controller.movable import Movable
from controller.options import ARRIVAL
from controller.pauses import RETRY_INTERVAL_S, longest_pause_s
from controller.placement import (
    Pending,
    PlacementFleet,
    is_wanted,
    joining_rows,
    next_start_s,
    note_plan,
    pessimistic_engine,
    place_admitted,
)
from planning.admission.plan import AdmissionOptions, plan_admission
from planning.admission.search import is_late_beside
from planning.tables import has_begun
from routing.placement import NOWHERE, tier_distance

LEAD_S = 0.1  # before its first iteration that a request is sent: the way to an engine, and the one it runs then
MOST_PLANS = 2  # replicas that are asked about a better set, per request
RECALLED_S = 1.0  # after a recall, by which a replica has been told to end the request

Askers = str | Mapping[str, str]  # the ingress that asks, or that of each request, by its id; "": it hears no recalls


@dataclass
class HeldRequests:
    """Those kept back and those sent, by uid; each has a row in the table of its place, as ``places`` knows.

    A fleet that does not let requests wait holds none, nor does one that prefills and decodes apart: there a request
    has room in both phases or in none.
    """

    places: RequestLocations
    may_hold: bool
    pending: dict[int, Pending] = field(default_factory=dict)  # kept back
    sent: dict[int, Pending] = field(default_factory=dict)  # not begun, as far as their replicas have told
    recalled_s: dict[int, float] = field(default_factory=dict)  # when they were
    recalls: list[tuple[str, str]] = field(default_factory=list)  # ingresses to be told, and attempt ids

    def __post_init__(self) -> None:
        self._movable = Movable(self._find)
        for p in (*self.pending.values(), *self.sent.values()) if self.may_hold else ():  # taken over
            self._movable.add(p)

    def __contains__(self, uid: int) -> bool:
        return uid in self.pending

    def _find(self, uid: int) -> Pending | None:
        return self.pending.get(uid) or self.sent.get(uid)

    def _may_lose_its_place(self, p: Pending) -> bool:
        """Whether the request stands for itself, and nobody has been told anything about it."""
        return self.may_hold and not p.request.group and p.is_checked and p.is_new and not p.is_returning_on_time

    def wait_s(self, p: Pending, replica: VirtualReplica, now_s: float) -> float:
        """How long a request with a place on this replica is kept back before it asks again; 0: it is sent now, as to
        an engine that has nothing."""
        early_s = p.begin_s - LEAD_S - replica.formed_ahead_s - now_s
        if not self._may_lose_its_place(p) or not RETRY_INTERVAL_S[0] <= early_s < np.inf:
            return 0.0
        if np.isfinite(replica.table["joined_s"]).sum() <= 1:  # the engine has nothing else
            return 0.0
        return min(early_s, longest_pause_s(len(self.pending)))

    def send(self, p: Pending) -> None:
        """The request goes to its replica; it may be recalled where its ingress listens."""
        if p.ingress and self._may_lose_its_place(p):
            self.sent[int(p.row["id"])] = p
            self._movable.add(p)

    def take_recalls(self) -> list[tuple[str, str]]:
        """Requests that were sent and must ask anew, since the last call: ingress and attempt id of each."""
        recalls, self.recalls = self.recalls, []
        return recalls

    def follow(self, replica: VirtualReplica, now_s: float) -> set[int]:
        """A replica has reported: what it has begun stays there. What was recalled does not count, and is returned."""
        if not (self.sent or self.recalled_s):
            return set()
        table, begun = replica.table, has_begun(replica.table)
        for uid in table["id"][begun].tolist() if self.sent else ():
            self.sent.pop(uid, None)
        self.recalled_s = {uid: at_s for uid, at_s in self.recalled_s.items() if now_s - at_s <= RECALLED_S}
        released = self.recalled_s.keys() & table["id"][~begun].tolist() if self.recalled_s else set()
        for uid in released:
            replica.release(uid)
        return released

    def hold(self, p: Pending, replica: VirtualReplica, now_s: float) -> None:
        """Keep back a request that has a place on this replica."""
        self.places.reconcile(int(p.row["id"]), replica, now_s)
        replica.slots.hold(replica.slot, int(p.row["id"]))
        self.pending[int(p.row["id"])] = p
        self._movable.add(p)

    def free(self, uid: int) -> None:
        """The request, held or not, has ended or asks again: it has no place any more."""
        self.pending.pop(uid, None)
        self.sent.pop(uid, None)
        self.recalled_s.pop(uid, None)
        self.places.free(uid)

    def forget(self, gone: Iterable[int]) -> None:
        """Those of ``gone`` whose reservation has ended: nobody asked for them any more, or their replica is gone."""
        for uid in gone:
            if uid not in self.places:
                self.pending.pop(uid, None)
                self.sent.pop(uid, None)

    def remap_tiers(self, tier_remap: np.ndarray) -> None:
        """Tell requests their tiers in another table (``TierTable.tier_remap``)."""
        for p in (*self.pending.values(), *self.sent.values()):
            p.tier = int(tier_remap[p.tier])
            p.row["tier"] = p.tier

    def displace(
        self, fleet: PlacementFleet, at: Mapping[int, VirtualReplica], asking: Sequence[Pending], now_s: float
    ) -> None:
        """Give new requests without a place those of others where that is a better set; ``at`` are replicas by slot.

        A held one that loses its place is given another where there is one; one that was sent is recalled. Who asks
        again is not asked about: the plans of its first time would only be made once more.
        """
        lost = list[Pending]()
        if fleet.options.selection == ARRIVAL or not (self.pending or self.sent):
            return
        newcomers = [p for p in asking if p.slot == NOWHERE and p.is_new]
        movable = self._by_slot() if newcomers else []
        for p in newcomers:
            for slot in _slots_to_plan(fleet.slots, movable, p):
                if p.slot == NOWHERE:
                    lost += self._displace_on(fleet, p, slot, now_s)
            if p.slot != NOWHERE:
                movable = self._by_slot()
        place_admitted(fleet.slots, lost, now_s, fleet.max_hops)
        for p in lost:
            if p.slot != NOWHERE:
                self.hold(p, at[p.slot], now_s)

    def _by_slot(self) -> list[tuple[int, float, float]]:
        return self._movable.by_slot()

    def _displace_on(self, fleet: PlacementFleet, p: Pending, slot: int, now_s: float) -> list[Pending]:
        """Put the request into the slot if the plan takes it; returns those of the held ones that must go for it."""
        slots, table = fleet.slots, fleet.slots.rows(slot)
        known = [uid in self.pending or uid in self.sent for uid in table["id"].tolist()]
        movable = np.array(known, dtype=np.bool_) & ~has_begun(table)
        options = AdmissionOptions(displace=True, movable=movable, searches=fleet.options.searches)
        start_s, engine, rows = (
            next_start_s(slots, slot, now_s),
            pessimistic_engine(slots, slot),
            joining_rows(slots, slot, [p]),
        )
        if is_late_beside(engine, table, ~movable, rows[0], start_s):
            return []
        plan = plan_admission(engine, table, rows, start_s, options)
        chances = plan_chances(slots.fleet_state, slot, rows, plan, now_s)
        if not plan.accepted[0] or not are_likely(slots.fleet_state, slot, rows, plan, chances):
            return []
        note_plan(p, plan, 0, slot, chances)
        p.is_checked = True
        gone = table["id"][plan.displaced].tolist()
        held = [self.pending.pop(uid) for uid in gone if uid in self.pending]
        for q in held:
            self.places.free(int(q.row["id"]))
            q.slot = NOWHERE
            if joined := len(slots.fleet_state.replicas) - len(q.scores) if len(q.scores) else 0:
                q.scores = np.append(q.scores, np.full(joined, -np.inf))  # slots made since it asked: not scored
            q.cached = NOTHING_CACHED  # as of when it asked
        for uid in gone:
            if uid in self.sent:
                self._recall(self.sent[uid], now_s)
        slots.add(slot, p.row_at(slot))
        return held

    def _recall(self, p: Pending, now_s: float) -> None:
        """Take a request back from its replica: its ingress is to end it there, and to ask anew."""
        uid = int(p.row["id"])
        self.free(uid)
        self.recalled_s[uid] = now_s
        self.recalls.append((p.ingress, p.request.request_id))


def _slots_to_plan(slots: ReplicaSlots, movable: Sequence[tuple[int, float, float]], p: Pending) -> list[int]:
    """Replicas of the request's tier with a place for a longer prompt or one worth less, the longest first."""
    state, value, prompt_tokens = slots.fleet_state.replicas, float(p.row["value"]), p.request.prompt_tokens
    found = {slot: longest for slot, longest, least in movable if longest > prompt_tokens or least < value}
    suited = [
        slot
        for slot in found
        if state["is_open"][slot] and is_wanted(p, slot) and tier_distance(int(state["tier"][slot]), p.tier) >= 0
    ]
    return sorted(suited, key=lambda slot: (-found[slot], slot))[:MOST_PLANS]
