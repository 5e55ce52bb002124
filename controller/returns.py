"""Which refused requests come back when, and the room that is reserved for them. Pure.

A refused request is told the first second at which the ledger (``routing.returns``) has room for it, and that room is
reserved. A request that comes then with the same prompts is the one that was refused, whatever its id. It goes before
newcomers, who are admitted only where they leave reserved room free: as much as the share of refused requests that come
back will need, and as far as there is credit (``controller.return_share``). So clients who never return cost the others
little. A request of several sequences has one time, and room for all of them.
"""

import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from controller.best_effort_line import BestEffortLine
from controller.disaggregation.phases import Phase
from controller.mirror.slots import ReplicaSlots
from controller.placement import Pending, place_on
from controller.reserved_return import Key, ReservedReturn, Room, as_anew, key_of, together, whole_row
from controller.return_share import ReturnShare
from planning.admission.plan import REASONS
from planning.admission.search import ADMITTED
from planning.deadlines import make_due_earlier
from planning.tables import copied
from routing.fits import fits_any
from routing.idle import at_best
from routing.placement import NOWHERE
from routing.returns import (
    BUCKETS,
    SEQUENCES,
    Ledger,
    add_claim,
    bucket_of,
    carry,
    claim_of,
    emptiest,
    first_room,
    is_kept,
    make_ledger,
    resized_ledger,
)

EARLY_S = 0.1  # before its time that a request is taken to be back
GRACE_S = 1.0  # after its time that its room is kept
MOST_TOLD = 20_000  # that are remembered at a time; beyond, refusals tell the cap and nothing is kept
SWEEP_S = 0.25
MOST_ALIKE = 256  # with the same prompt that have a time of their own
MOST_ASKED = 16  # replicas, the emptiest, that are asked when they will have room
MOST_CARRIED = 64  # replicas that are brought up to date for one batch; those whose turn comes later are a little old
MOST_CHECKED = 2  # replicas that a newcomer that was sent away is checked on
MOST_MOVED = 256  # reservations whose replica is gone, that find another one before a batch is decided
OLDEST_S = 20.0  # the ring of the ledger says nothing of a replica that was carried longer ago


@dataclass
class Returns:
    """The reserved returns of a fleet, and its ledger."""

    cap_s: int
    share: ReturnShare = field(default_factory=ReturnShare)  # of those told that come when told
    _ledger: Ledger = field(default_factory=lambda: make_ledger(0))
    _returns_by_key: dict[Key, list[ReservedReturn]] = field(default_factory=dict)  # each by time
    _count: int = 0
    _homeless: deque[ReservedReturn] = field(default_factory=deque)  # which may have come or been given up since
    _kept_on: dict[int, int] = field(default_factory=dict)  # reservations on each slot that has any
    _carried_s: np.ndarray = field(default_factory=lambda: np.zeros(0))  # when each slot was entered in the ledger
    _is_current: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=bool))  # and knows what was placed since
    _swept_s: float = -math.inf
    # Newcomers, with what they ask for and the slots that are kept from them.
    _sent_away: list[tuple[Pending, np.ndarray, np.ndarray]] = field(default_factory=list)

    def __len__(self) -> int:
        """How many are expected."""
        return self._count

    def forget(self, slot: int) -> None:
        """A replica is gone, and with it the room that was kept there; another one is to keep as much."""
        if slot < len(self._ledger.reserved):
            self._ledger.reserved[slot] = self._ledger.carried[slot] = 0.0
            self._kept_on.pop(slot, None)
        for reserved in self._returns_by_key.values():
            for each in reserved:
                if (claimed := each.room.pop(slot, None)) is not None:
                    each.lost.append(claimed)
                    self._homeless.append(each)
                each.slot = NOWHERE if each.slot == slot else each.slot

    def remap_tiers(self, tier_remap: np.ndarray) -> None:
        """Tell refused requests their tiers in another table (``TierTable.tier_remap``)."""
        for reserved in self._returns_by_key.values():
            for each in reserved:
                each.tier = int(tier_remap[each.tier])

    # -- those that come --------------------------------------------------------------------------------------------

    def receive(
        self,
        slots: ReplicaSlots,
        asking: Sequence[Pending],
        waiting: Collection[int],
        in_line: BestEffortLine,
        now_s: float,
    ) -> None:
        """Requests with an objective ask, each by its first sequence. Those that were told to come now are placed where
        room is kept for them, if that still is so; all other newcomers want no replica whose room is kept. Those
        ``waiting``, by uid, came earlier: they neither return now nor are they newcomers. Nor do those ``in_line`` for
        best effort return; they have used credit when they came."""
        self._is_current[:], self._sent_away = False, []
        self._sweep(now_s)
        if not self._count:
            self._homeless.clear()
            return
        if self._homeless and asking:
            self._rehouse(slots, asking[0].phase, now_s)
        newcomers = []
        for p in asking:
            if (uid := int(p.row["id"])) in waiting:
                continue
            if uid not in in_line and (reserved := self._take(p, now_s)) is not None:
                self._put_back(slots, p, reserved, now_s)
            elif p.is_new:
                newcomers.append(p)
        where = np.array(sorted(self._kept_on), dtype=np.int64)
        if not (newcomers and len(where) and self.share.may_send_away(now_s)):
            return
        self._carry(slots, where, now_s)
        ledger = self._ledger._replace(share=self.share.of_told(now_s))
        for p in newcomers:
            kept = where[is_kept(slots.fleet_state, ledger, whole_row(p)[None][0], now_s, where)]
            if not len(kept):
                continue
            if key_of(p) not in self._returns_by_key and int(p.row["id"]) not in in_line:
                self._sent_away.append((p, copied(p.row), kept))
            for sequence in (p, *p.siblings):
                sequence.scores_as_best_effort = sequence.scores
                sequence.exclude_slots(slots, kept.tolist(), now_s)
        self._is_current[:] = False

    def charge(self, slots: ReplicaSlots, now_s: float) -> None:
        """Count the newcomers just received that found no place, and have one where room is kept for others."""
        for p, asked, kept in self._sent_away:  # by now what found no place may be best effort, which fits anywhere
            wanted = p.scores_as_best_effort
            free = kept if wanted is None or not len(wanted) else kept[wanted[kept] > -np.inf]
            if p.slot == NOWHERE and fits_any(slots.fleet_state, free, asked[None][0], MOST_CHECKED, now_s):
                self.share.note(now_s, sent_away=1)
        self._sent_away = []

    @staticmethod
    def _put_back(slots: ReplicaSlots, p: Pending, reserved: ReservedReturn, now_s: float) -> None:
        """Place a request where room was kept, until one of its sequences finds none there."""
        kept = [reserved.slot, *(slot for slot in reserved.room if slot != reserved.slot)]
        for sequence in (p, *p.siblings):
            for slot in kept:
                if slot != NOWHERE and sequence.slot == NOWHERE:
                    place_on(slots, sequence, slot, now_s)
            if sequence.slot == NOWHERE:
                return

    def _take(self, p: Pending, now_s: float) -> ReservedReturn | None:
        """What a request was told that comes at its time; its room is free from here on."""
        reserved = self._returns_by_key.get(key_of(p)) if p.is_new else None
        if not reserved or now_s < reserved[0].due_s - EARLY_S:
            return None
        self.share.note(now_s, came=1)
        p.is_returning_on_time = True
        return self._release(key_of(p))

    # -- those that are refused -------------------------------------------------------------------------------------

    def retry_after_s(self, slots: ReplicaSlots, p: Pending, now_s: float) -> float:
        """Whole seconds after which the request will be attainable, at most the cap; 0 for what no replica can ever do.

        Who asks again too early may be another client with the same prompt: it gets a later time, and the first one
        stays. At the cap no room is kept. What a replica can ever do is not known while it is far slower than its
        profile says, nor while promises of the tier are planned early: both may pass. What an idle one would do is
        noted as the prediction, and what it lacks as the reason.
        """
        row, key = p.row[None][0], key_of(p)
        p.first_s = p.tpot_s = math.inf
        if not p.is_possible:
            return float(self.cap_s) if p.may_become_possible else 0.0
        reason, ttft_s, tpot_s = at_best(slots.fleet_state, row, now_s)
        if reason != ADMITTED:
            if slots.may_recover(row, now_s) or _fits_as_asked(slots, p, now_s):
                return float(self.cap_s)
            p.reason = REASONS[reason].value
            p.first_s, p.tpot_s = float(row["arrival_s"]) + ttft_s, tpot_s
            return 0.0
        self._make_room(len(slots.fleet_state.replicas))
        if len(reserved := self._returns_by_key.get(key, [])) >= MOST_ALIKE:
            return float(min(self.cap_s, max(1, math.ceil(reserved[-1].due_s - now_s))))
        wait_s, slot = self._first_room(slots, as_anew(p.row, now_s)[None][0], now_s)
        if slot == NOWHERE or self._count >= MOST_TOLD:
            return float(self.cap_s)
        self._keep(slots, p, slot, wait_s, now_s)
        return float(wait_s)

    def _first_room(self, slots: ReplicaSlots, row: np.void, now_s: float) -> tuple[int, int]:
        """Whole seconds until a replica has room, and which (``routing.returns.first_room``)."""
        asked = emptiest(slots.fleet_state, int(row["tier"]), MOST_ASKED)
        self._carry(slots, asked, now_s)
        ledger = self._ledger._replace(share=self.share.of_told(now_s))
        wait_s, slot = first_room(slots.fleet_state, ledger, row, now_s, self.cap_s, asked)
        return int(wait_s), int(slot)

    def _keep(self, slots: ReplicaSlots, p: Pending, slot: int, wait_s: int, now_s: float) -> None:
        """Keep room for a request that comes ``wait_s`` from now: for a sibling that has a place today, there."""
        room = Room()
        for sequence in (p, *p.siblings):
            at = slot if sequence.slot == NOWHERE else sequence.slot
            claim = claim_of(slots.fleet_state, at, as_anew(sequence.row, now_s)[None][0], now_s, False)
            room[at] = together(room.get(at), (claim.terms, claim.lasts))
        made = ReservedReturn(now_s + wait_s, slot, room, p.tier, p.phase)
        reserved = self._returns_by_key.setdefault(key_of(p), [])
        reserved.append(made)
        reserved.sort(key=lambda each: each.due_s)
        self._enter(made, 1.0)
        self._count += 1

    def _enter(self, reserved: ReservedReturn, sign: float) -> None:
        """Enter the room that is kept (1) or take it out (-1)."""
        for slot, (terms, lasts) in reserved.room.items():
            self._kept_on[slot] = self._kept_on.get(slot, 0) + int(sign)
            if not self._kept_on[slot]:
                del self._kept_on[slot]
            add_claim(self._ledger.reserved, slot, bucket_of(reserved.due_s), terms, lasts, sign)

    def _release(self, key: Key) -> ReservedReturn:
        """Free the room of the first of a prompt's reserved returns."""
        reserved = self._returns_by_key[key]
        first = reserved.pop(0)
        if not reserved:
            del self._returns_by_key[key]
        self._enter(first, -1.0)
        first.lost = []
        self._count -= 1
        return first

    def _rehouse(self, slots: ReplicaSlots, phase: Phase | None, now_s: float) -> None:
        """Keep the room that was lost with a replica on those open ones that have the fewest sequences then, whether or
        not there is room: those told will come, and go before others. Where none is open it is tried again."""
        self._make_room(len(slots.fleet_state.replicas))
        for _ in range(min(MOST_MOVED, len(self._homeless))):
            each = self._homeless.popleft()
            if not each.lost:
                continue
            others = emptiest(slots.fleet_state, each.tier, MOST_ASKED)
            if each.phase != phase or not len(others):
                self._homeless.append(each)
                continue
            self._carry(slots, others, now_s)
            self._enter(each, -1.0)
            for claimed in each.lost:
                at = others, bucket_of(each.due_s) % BUCKETS, SEQUENCES
                slot = int(others[(self._ledger.carried[at] + self._ledger.reserved[at]).argmin()])
                each.room[slot] = together(each.room.get(slot), claimed)
                each.slot = slot if each.slot == NOWHERE else each.slot
            each.lost = []
            self._enter(each, 1.0)
        self._is_current[:] = False

    # -- bookkeeping ------------------------------------------------------------------------------------------------

    def _make_room(self, replicas: int) -> None:
        """Let the ledger have as many replicas as there are slots."""
        if (joined := replicas - len(self._ledger.reserved)) > 0:
            self._ledger = resized_ledger(self._ledger, replicas)
            self._carried_s = np.append(self._carried_s, np.full(joined, -np.inf))
            self._is_current = np.append(self._is_current, np.zeros(joined, dtype=bool))

    def _carry(self, slots: ReplicaSlots, which: np.ndarray, now_s: float) -> None:
        """Bring the ledger up to what these slots have promised, once for the requests that ask together; of many
        slots those that were brought up longest ago."""
        old = which[~self._is_current[which]]
        if len(old) > MOST_CARRIED:
            old = old[np.argsort(self._carried_s[old], kind="stable")]
            must = int((self._carried_s[old] < now_s - OLDEST_S).sum())
            old = old[: max(MOST_CARRIED, must)]
        carry(slots.fleet_state, now_s, self._ledger, old)
        self._carried_s[old], self._is_current[old] = now_s, True

    def _sweep(self, now_s: float) -> None:
        """Give up those that did not come."""
        if now_s - self._swept_s < SWEEP_S:
            return
        self._swept_s = now_s
        for key in [key for key, reserved in self._returns_by_key.items() if now_s > reserved[0].due_s + GRACE_S]:
            while (reserved := self._returns_by_key.get(key)) and now_s > reserved[0].due_s + GRACE_S:
                self._release(key)
                self.share.note(now_s, missing=1)


def _fits_as_asked(slots: ReplicaSlots, p: Pending, now_s: float) -> bool:
    """Whether an idle replica could serve a request that cannot be planned as early as its tier's margin asks."""
    row = copied(p.row)
    make_due_earlier(row, -p.margin_s)
    return p.margin_s > 0.0 and at_best(slots.fleet_state, row[None][0], now_s)[0] == ADMITTED
