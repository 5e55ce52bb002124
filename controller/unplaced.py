"""Requests that no replica has: those that wait for room, best effort in line, those told to come back. Pure."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from controller.best_effort_line import BestEffortLine
from controller.disaggregation.phases import Phase
from controller.lengths.fleet_lengths import FleetLengths
from controller.mirror.slots import DOUBT_S, ReplicaSlots
from controller.pauses import RETRY_INTERVAL_S, longest_pause_s
from controller.placement import Pending
from controller.programs.programs import Programs
from controller.returns import Returns
from planning.admission.search import ADMITTED
from planning.tables import copied
from protocol.messages import Verdict
from routing import idle
from routing.best_effort import best_effort_places

UNBOUND_S = 30.0  # from arrival a request may wait that bounds neither its first token nor its end
COLD_START_S = 300.0  # best effort waits so long for the first replica of a fleet that was scaled to zero
START_PAUSE_S = RETRY_INTERVAL_S[1]  # between two questions of one that does
RETRIES_LEFT = 4  # parts of the time that is left until the next question
NEWS_S = 2.0 * DOUBT_S  # a request waits so long for a replica that was seen to fail and reports all the while
SETTLING_S = 0.1  # pause of a request that would be refused while most replicas have not been heard yet
PENDING_TIMEOUT_S = 3.0  # a pending request that has not asked for so long, many times the pause, has lost its ingress


@dataclass(frozen=True)
class Waiting:
    """A pending request, as the fleet remembers it between two questions."""

    tier: int
    prompt_tokens: int
    asked_s: float  # when it asked last
    latest_s: float  # when it must start at the latest; -inf: no idle replica could do it; nan: not known yet
    phase: Phase | None = None  # that it waits for, in a disaggregated fleet
    is_returning_on_time: bool = False  # it came when an earlier refusal had told, and found no room at once

    def pause_s(self, now_s: float, longest_s: float) -> float:
        """How long to wait until it asks again; 0 when it is too late for that."""
        left_s = self.latest_s - now_s
        pause_s = min(max(left_s / RETRIES_LEFT, RETRY_INTERVAL_S[0]), longest_s)
        return pause_s if left_s > RETRY_INTERVAL_S[0] else 0.0

    @property
    def forget_s(self) -> float:
        """When it is taken to have lost its ingress, which asks several times a second."""
        return self.asked_s + PENDING_TIMEOUT_S

    def of_tier(self, tier: int) -> "Waiting":
        """The same in another tier table."""
        return replace(self, tier=tier)


@dataclass
class Unplaced:
    """A request is in at most one of the three, and leaves it when it gets a place or ends."""

    returns: Returns
    lengths: FleetLengths
    waiting: dict[int, Waiting] = field(default_factory=dict)  # pending requests by uid, who asked last at the end
    line: BestEffortLine = field(default_factory=BestEffortLine)
    settled_s: float = -math.inf  # until then more replicas are there than have been heard: nobody is refused
    _doubted_s: dict[int, float] = field(default_factory=dict)  # when requests first met with replicas all in doubt

    def adopt_state(self, other: "Unplaced") -> None:
        """Take over who waits, and what was told; the cap of reserved returns is one's own."""
        other.returns.cap_s = self.returns.cap_s
        self.returns, self.waiting, self.line = other.returns, other.waiting, other.line
        self.settled_s, self._doubted_s = other.settled_s, other._doubted_s

    def __contains__(self, uid: int) -> bool:
        return uid in self.waiting or uid in self.line

    def leave(self, uid: int) -> None:
        """The request has a place, or has ended."""
        self.waiting.pop(uid, None)
        self.line.leave(uid)

    def remap_tiers(self, tier_remap: np.ndarray) -> None:
        """Tell requests their tiers in another table (``TierTable.tier_remap``)."""
        self.waiting = {uid: w.of_tier(int(tier_remap[w.tier])) for uid, w in self.waiting.items()}
        self.returns.remap_tiers(tier_remap)

    def forget(self, now_s: float) -> None:
        """Give up pending requests that ask no more."""
        while self.waiting and now_s > self.waiting[uid := next(iter(self.waiting))].forget_s:
            del self.waiting[uid]
        while self._doubted_s and now_s > self._doubted_s[uid := next(iter(self._doubted_s))] + 2.0 * NEWS_S:
            del self._doubted_s[uid]

    def receive(self, slots: ReplicaSlots, asking: Sequence[Pending], earlier: Collection[int], now_s: float) -> None:
        """``Returns.receive``; who came at its time and waits has still come at its time when it asks again."""
        for p in asking:
            known = self.waiting.get(int(p.row["id"]))
            p.is_returning_on_time = known is not None and known.is_returning_on_time
        self.returns.receive(slots, asking, earlier, self.line, now_s)

    def may_wait(self, p: Pending, refuses: bool) -> bool:
        """Whether a request may wait for room that is not there yet: where its tier refuses, one that was told to come
        back now; not what is in line for best effort because it is too late."""
        uid = int(p.row["id"])
        return uid not in self.line and (not refuses or p.is_returning_on_time or uid in self.waiting)

    def ask(self, p: Pending, now_s: float, latest_s: Callable[[], float]) -> Waiting:
        """Note that a pending request asks; by when it must start is asked for once."""
        uid = int(p.row["id"])
        known = self.waiting.pop(uid, None)
        at_last_s = latest_s() if known is None or math.isnan(known.latest_s) else known.latest_s
        told = p.tier, p.request.prompt_tokens, now_s, at_last_s, p.phase, p.is_returning_on_time
        waiting = self.waiting[uid] = Waiting(*told)
        return waiting

    def pause_s(self, slots: ReplicaSlots, p: Pending, now_s: float) -> float:
        """How long a request that does not fit now should wait before it asks again; 0 when it is too late for that."""
        if not slots.is_any_open:
            return 0.0
        waiting = self.ask(p, now_s, lambda: latest_start_s(slots, p.row, now_s))
        return waiting.pause_s(now_s, longest_pause_s(len(self.waiting)))

    def hand_over_pause_s(self, p: Pending, latest_s: float, now_s: float) -> float:
        """The same of one that was prefilled and must begin to decode by ``latest_s``."""
        return self.ask(p, now_s, lambda: latest_s).pause_s(now_s, longest_pause_s(len(self.waiting)))

    def news_s(self, slots: ReplicaSlots, p: Pending, silent_s: float, now_s: float) -> float:
        """How long a new request waits before it asks again while all replicas that report were seen to fail, as when
        one ingress has lost its connections; 0: it is not so, or has been so for long."""
        if not p.is_new or slots.is_any_open or not slots.is_any_in_doubt(now_s, silent_s):
            return 0.0
        first_s = self._doubted_s.setdefault(int(p.row["id"]), now_s)
        if p.is_returning_on_time:  # which is remembered; nobody can say yet by when it must start
            self.ask(p, now_s, lambda: math.nan)
        return RETRY_INTERVAL_S[1] if now_s - first_s < NEWS_S else 0.0

    def awaits_start(self, p: Pending, now_s: float) -> bool:
        """Whether a replica may still come for a request that found none: one is started where all were stopped."""
        return now_s < self.ask(p, now_s, lambda: now_s + COLD_START_S).latest_s

    @staticmethod
    def places(slots: ReplicaSlots, p: Pending, backlog: float) -> np.ndarray:
        """How many requests more as best effort each replica takes that may serve this one (i8[R], by
        ``routing.best_effort``)."""
        if p.scores_as_best_effort is not None:
            p.scores = p.scores_as_best_effort
        places: np.ndarray = best_effort_places(slots.fleet_state, backlog)
        return np.where(p.scores > -np.inf, places, 0) if len(p.scores) else places

    def line_s(self, p: Pending, places: np.ndarray, programs: Programs, now_s: float) -> float:
        """How long best effort waits before it asks again, while replicas hold as much of it as they may (``places``
        are free on each, i8[R]), or its program has to wait; 0: it is its turn."""
        uid, wait_s = int(p.row["id"]), programs.place_wait_s(p, now_s)
        wait_s = wait_s or self.line.wait_s(uid, float(p.row["arrival_s"]), int(places.sum()), now_s)
        if wait_s > 0.0:
            self.waiting.pop(uid, None)
        return wait_s

    def refusal(self, slots: ReplicaSlots, p: Pending, now_s: float) -> tuple[Verdict, float]:
        """What a request is told that its tier refuses, and for how long."""
        if now_s < self.settled_s:
            self.waiting.pop(int(p.row["id"]), None)
            return Verdict.PENDING, SETTLING_S
        return Verdict.REFUSED, self.retry_after_s(slots, p, now_s)

    def retry_after_s(self, slots: ReplicaSlots, p: Pending, now_s: float) -> float:
        """What a refusal tells (``Returns.retry_after_s``); 0 where no replica is open."""
        self.waiting.pop(int(p.row["id"]), None)
        if not slots.fleet_state.replicas["is_open"].any():
            return 0.0
        wait_s = self.returns.retry_after_s(slots, p, now_s)
        return wait_s if wait_s or not self._may_be_shorter(slots, p, now_s) else float(self.returns.cap_s)

    def _may_be_shorter(self, slots: ReplicaSlots, p: Pending, now_s: float) -> bool:
        """Whether an idle replica could serve a request that none can, if its output were as long as configured."""
        row, mean_tokens = copied(p.row), int(self.lengths.tiers.prior(p.request.slo.tier))
        row["output_tokens"] = min(row["output_tokens"], mean_tokens)
        if row["output_tokens"] == p.row["output_tokens"]:
            return False
        if idle.at_best(slots.fleet_state, row[None][0], now_s)[0] != ADMITTED:
            return False
        return self.lengths.doubt(p.request, now_s)


def latest_start_s(slots: ReplicaSlots, row: np.ndarray, now_s: float) -> float:
    """When a request must start at the latest on an idle replica (``routing.idle``); -inf: none could attain it."""
    return float(idle.latest_start_s(slots.fleet_state, row[None][0], now_s, UNBOUND_S))
