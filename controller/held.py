"""Requests that have a place and are not sent yet: until they begin, a better set may take it from them. Pure.

A request that would only wait in its engine's queue waits at its ingress instead, which asks again shortly before the
request is due to begin. Nothing has been told to its client, so that a newcomer worth more, or as much for less work,
may still have its place (SLOs-Serve section 4.1; of equal values the shorter prompt goes first, Moore and Hodgson's
rule). Who loses a place looks for another at once, and asks again in any case.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from controller.mirror.locations import RequestLocations
from controller.mirror.replica_model import VirtualReplica
from controller.mirror.slots import ReplicaSlots
from controller.placement import (
    RETRY_INTERVAL_S,
    Pending,
    PlacementFleet,
    is_wanted,
    next_start_s,
    note_plan,
    pessimistic_engine,
    place_admitted,
)
from planning.admission.plan import AdmissionOptions, plan_admission
from routing.placement import NOWHERE, tier_distance

LEAD_S = 0.1  # before its first iteration that a request is sent: the way to an engine, and the one it runs then
MOST_PLANS = 2  # replicas that are asked about a better set, per request


@dataclass
class HeldRequests:
    """Those kept back, by uid; each has a row in the table of its place, as ``places`` knows.

    A fleet that does not let requests wait holds none, nor does one that prefills and decodes apart: there a request
    has room in both phases or in none.
    """

    places: RequestLocations
    may_hold: bool
    pending: dict[int, Pending] = field(default_factory=dict)

    def __contains__(self, uid: int) -> bool:
        return uid in self.pending

    def wait_s(self, p: Pending, now_s: float) -> float:
        """How long a request that has a place is kept back before it asks again; 0: it is sent now."""
        is_single = self.may_hold and not p.request.group and p.is_checked
        early_s = p.begin_s - LEAD_S - now_s
        if not is_single or not p.is_new or p.is_returning_on_time or not RETRY_INTERVAL_S[0] <= early_s < np.inf:
            return 0.0
        return min(early_s, RETRY_INTERVAL_S[1])

    def hold(self, p: Pending, replica: VirtualReplica, now_s: float) -> None:
        """Keep back a request that has a place on this replica."""
        self.places.reconcile(int(p.row["id"]), replica, now_s)
        self.pending[int(p.row["id"])] = p

    def free(self, uid: int) -> None:
        """The request, held or not, has ended or asks again: it has no place any more."""
        self.pending.pop(uid, None)
        self.places.free(uid)

    def forget(self) -> None:
        """Those whose reservation has ended, because nobody asked for them any more or their replica is gone."""
        self.pending = {uid: p for uid, p in self.pending.items() if uid in self.places}

    def remap_tiers(self, tier_remap: np.ndarray) -> None:
        """Tell requests their tiers in another table (``TierTable.tier_remap``)."""
        for p in self.pending.values():
            p.tier = int(tier_remap[p.tier])
            p.row["tier"] = p.tier

    def displace(
        self, fleet: PlacementFleet, at: Mapping[int, VirtualReplica], asking: Sequence[Pending], now_s: float
    ) -> None:
        """Give requests without a place those of held ones where that is a better set; ``at`` are replicas by slot.

        Who loses a place is given another where there is one.
        """
        lost = list[Pending]()
        for p in asking if self.pending else ():
            for slot in self._slots_to_plan(fleet.slots, p):
                if p.slot == NOWHERE:
                    lost += self._displace_on(fleet.slots, p, slot, now_s)
        place_admitted(fleet.slots, lost, now_s, fleet.max_hops)
        for p in lost:
            if p.slot != NOWHERE:
                self.hold(p, at[p.slot], now_s)

    def _slots_to_plan(self, slots: ReplicaSlots, p: Pending) -> list[int]:
        """Replicas of the request's tier that hold a place for a longer prompt or one worth less, the longest first."""
        state, found = slots.fleet_state.replicas, dict[int, int]()
        for q in self.pending.values():
            is_better = q.row["value"] < p.row["value"] or q.row["prompt_tokens"] > p.row["prompt_tokens"]
            if is_better and q.slot != NOWHERE and state["is_open"][q.slot]:
                found[q.slot] = max(found.get(q.slot, 0), int(q.row["prompt_tokens"]))
        suited = [s for s in found if is_wanted(p, s) and tier_distance(int(state["tier"][s]), p.tier) >= 0]
        return sorted(suited, key=lambda slot: (-found[slot], slot))[:MOST_PLANS]

    def _displace_on(self, slots: ReplicaSlots, p: Pending, slot: int, now_s: float) -> list[Pending]:
        """Put the request into the slot if the plan takes it; returns those of the held ones that must go for it."""
        table = slots.rows(slot)
        has_begun = table["running"] | (table["computed_tokens"] > 0)
        options = AdmissionOptions(displace=True, movable=np.isin(table["id"], list(self.pending)) & ~has_begun)
        start_s = next_start_s(slots, slot, now_s)
        plan = plan_admission(pessimistic_engine(slots, slot), table, p.row[None], start_s, options)
        if not plan.accepted[0]:
            return []
        note_plan(p, plan, 0, slot)
        p.is_checked = True
        lost = [self.pending.pop(uid) for uid in table["id"][plan.displaced].tolist()]
        for q in lost:
            self.places.free(int(q.row["id"]))
            q.slot = NOWHERE
            if joined := len(slots.fleet_state.replicas) - len(q.scores) if len(q.scores) else 0:
                q.scores = np.append(q.scores, np.full(joined, -np.inf))  # slots made since it asked: not scored
        slots.add(slot, p.row)
        return lost
