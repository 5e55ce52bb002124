"""A fleet that prefills on some of its replicas and decodes on the others. Pure, like ``controller.fleet``.

PolyServe sections 2.4 and 4. Prompts of all tiers go to the idlest prefill replica that attains the first token. With
its first token, a request goes to a decode replica of its own tier.

A request is served whole by a decode replica if it cannot move or if its KV cache was lost. Room to decode is reserved
(``controller.disaggregation.decode_room``) before its prompt is computed. Without such room a request waits, or follows
what its tier says for unattainable requests.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext

import msgspec
import numpy as np

from controller.disaggregation.decode_room import DecodeRoom, Reservation
from controller.disaggregation.phases import HAND_OVER_S, Phase, PhaseOptions, Phases, PhaseView
from controller.disaggregation.split import decode_slot, has_kv_room, prefill_part, ready_row
from controller.fleet import Fleet
from controller.held import Askers
from controller.mirror.replica_model import VirtualReplica, admission_row
from controller.options import FleetOptions
from controller.placement import Pending
from controller.scaling.history import Change
from controller.scaling.role import ReplicaView
from controller.scaling.tiers import TierTable
from planning.deadlines import make_due_earlier
from profiles.profile import Profile
from protocol.messages import AdmissionRequest, Decision, Outcome, Report, Scope, Verdict, request_uid
from routing.placement import NOWHERE, tier_distance
from routing.policy import best_scored, idlest

BALANCE_S = 0.5  # between two looks at the sizes of the phases


class DisaggregatedFleet(Fleet):
    """``Fleet``, asked about one phase at a time."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.phases = Phases(self.options.phases or PhaseOptions())
        self.room = DecodeRoom()
        self._silent: set[str] = set()  # replicas that have not reported lately
        self._balanced_s = float("-inf")

    def adopt_state(self, other: Fleet, now_s: float) -> None:
        if isinstance(other, DisaggregatedFleet):
            self.phases.adopt_state(other.phases)
            self.room = other.room
        super().adopt_state(other, now_s)

    def _remap_tiers(self, tier_remap: np.ndarray) -> None:
        super()._remap_tiers(tier_remap)
        self.room.remap_tiers(tier_remap)

    def _drop(self, replica: VirtualReplica, reason: str, now_s: float) -> None:
        super()._drop(replica, reason, now_s)
        self.room.drop(replica.name)

    def on_outcome(self, outcome: Outcome, now_s: float) -> None:
        if outcome.scope != Scope.REQUEST and not outcome.is_first_token:
            self.room.forget(request_uid(outcome.request_id))
        super().on_outcome(outcome, now_s)

    # -- replicas ---------------------------------------------------------------------------------------------------

    def open_slots(self, now_s: float, phase: Phase | None = None) -> np.ndarray:
        """Slots of the phase; all where that phase has none."""
        alive, own = super().open_slots(now_s), np.zeros(len(self.slots.liveness), dtype=bool)
        if phase is not None:
            own[[self.replicas[name].slot for name in self.phases.on(phase) if name in self.replicas]] = True
        mine = alive & own
        return mine if mine.any() else alive

    def _allocate(self, now_s: float) -> None:
        bound = {name: replica.phase for name, replica in self.replicas.items()}
        self.phases.set_replicas(bound, self._silent.union(self.allocation.draining), self.allocation.phase_needs)
        super()._allocate(now_s)

    def views(self, now_s: float) -> list[ReplicaView]:
        """With each replica's phase; what is reserved counts as there."""
        reserved = self.room.counts(self.tiers.pool)
        return [self._with_phase(view, reserved.get(view.name, ())) for view in super().views(now_s)]

    def _with_phase(self, view: ReplicaView, reserved: Sequence[int]) -> ReplicaView:
        name, requests = view.name, view.slo_requests
        if reserved:
            requests = tuple(a + b for a, b in zip(requests, reserved, strict=True))
        return view._replace(slo_requests=requests, phase=self.phases.of(name), is_bound=self.phases.is_bound(name))

    def report(self, report: Report, now_s: float) -> bool:
        are_live = self.slots.are_live(now_s, self.options.silent_s)
        self._silent = {self.by_slot[slot].name for slot in np.flatnonzero(~are_live).tolist() if slot in self.by_slot}
        is_whole = super().report(report, now_s)
        if now_s - self._balanced_s >= BALANCE_S:
            self._balanced_s = now_s
            self._balance(now_s)
        return is_whole

    def _balance(self, now_s: float) -> None:
        """Let a replica change its phase where one is short; the requests that it holds stay with it."""
        self._expire(now_s)  # what is kept in vain would count as load until somebody asks
        views = [
            PhaseView(r.name, self._busy(r), r.name not in self._silent, self.allocation.is_open(r.name))
            for r in self.replicas.values()
        ]
        if move := self.phases.step(views, now_s):
            self.allocation.history.note(Change(now_s, move.name, move.to.other, move.to, move.reason))
            self._allocate(now_s)

    def _busy(self, replica: VirtualReplica) -> float:
        """A prefilling replica is busy while promised prompts are there; a decoding one by its load."""
        state = replica.state[0]
        if self.phases.of(replica.name) == Phase.PREFILL:
            return float(state["count"] > state["best_effort"])
        return float(state["load"])

    # -- decisions --------------------------------------------------------------------------------------------------

    def admit(self, batch: Sequence[AdmissionRequest], now_s: float, by: Askers = "") -> list[Decision]:
        """First those whose room is reserved, then others that decode, then prompts; all count what is reserved."""
        batch = self._prepare(batch, now_s, 0.0)
        self._expire(now_s)
        decisions = self.programs.without_place(batch, now_s)
        with self.room.counted(self.slots):
            decisions |= self._decide_apart([r for r in batch if r.request_id not in decisions], now_s)
        return self.programs.told([_of_whole(decisions[request.request_id], request) for request in batch], now_s)

    def _expire(self, now_s: float) -> None:
        """Move room off replicas that take nothing new; give up what stays on silent ones, or nobody will ask for."""
        self._move_reservations(now_s)
        is_of_use = self.slots.usable([], now_s, self.options.silent_s, self.options.forget_s)
        is_of_use |= self.slots.are_live(now_s, self.options.silent_s)  # also to what it has promised, if it drains
        names = [name for name, replica in self.replicas.items() if is_of_use[replica.slot]]
        self.room.expire(names, self.places.__contains__, now_s)

    def _decide_apart(self, batch: Sequence[AdmissionRequest], now_s: float) -> dict[str, Decision]:
        """Decisions by request id."""
        decisions = dict[str, Decision]()
        for request in batch:
            uid = request_uid(request.request_id)
            if request.transferred_kv_tokens and uid in self.room.held:
                decisions[request.request_id] = self._hand_over(request, uid, now_s)
            else:
                self.room.release(self.slots, uid)  # it is asked about anew
        prefills = self._that_prefill([request for request in batch if request.request_id not in decisions], now_s)
        others = [r for r in batch if r.request_id not in prefills and r.request_id not in decisions]
        decisions |= {d.request_id: d for d in self._on(Phase.DECODE, others, now_s)}
        for decision in self._on(Phase.PREFILL, [part for part, _ in prefills.values()], now_s):
            if decision.verdict != Verdict.ADMITTED:
                self.room.release(self.slots, request_uid(decision.request_id))
            part, output_tokens = prefills[decision.request_id]
            decisions[decision.request_id] = msgspec.structs.replace(
                decision,
                prefill_only=bool(decision.replica),
                output_tokens=output_tokens,
                transfer_s=self._transfer_s(part),
            )
        return decisions

    def _hand_over(self, request: AdmissionRequest, uid: int, now_s: float) -> Decision:
        """Who decodes a request whose room was reserved: it finds all reservations but its own."""
        reservation = self.room.release(self.slots, uid)
        if reservation is not None and reservation.slot not in self._open_on(Phase.DECODE, now_s):
            return self._decode_on(reservation.slot, request, now_s)
        (decision,) = self._on(Phase.DECODE, [request], now_s)
        if decision.verdict == Verdict.PENDING and reservation is not None:
            reservation.needed_s = now_s
            self.room.reserve(self.slots, uid, reservation)
        return decision

    def _decode_on(self, slot: int, request: AdmissionRequest, now_s: float) -> Decision:
        """What has room on a replica that takes nothing new is decoded there."""
        self.slots.allocate(1)
        p = self._to_pending(request, now_s, Phase.DECODE)
        p.slot, p.is_checked = slot, True
        self.slots.add(slot, p.row)
        return self._admitted(p, self.by_slot[slot], now_s)

    def _move_reservations(self, now_s: float) -> None:
        """Of replicas that leave, or that prefill now, to others with room, not to the prompt's own; else it stays."""
        decoding = self._open_on(Phase.DECODE, now_s)
        leaving = [(uid, r) for uid, r in self.room.held.items() if r.slot not in decoding]
        with self.room.counted(self.slots) if leaving else nullcontext():
            for uid, before in leaving:
                self.room.release(self.slots, uid)
                others = {slot: name for slot, name in decoding.items() if name != self.places.holder(uid)}
                if self._reserve(before.row, others, now_s):
                    self.room.held[uid].needed_s = before.needed_s
                else:
                    self.room.reserve(self.slots, uid, before)

    def _open_on(self, phase: Phase, now_s: float) -> dict[int, str]:
        """Replicas of a phase that may take requests: their slots and names."""
        return {r.slot: r.name for r in self.live(now_s) if self.phases.of(r.name) == phase}

    def _on(self, phase: Phase, batch: list[AdmissionRequest], now_s: float) -> list[Decision]:
        self._open(now_s, phase)
        return self._decide(batch, now_s, "", phase) if batch else []

    def _transfer_s(self, request: AdmissionRequest) -> float:
        """How long the KV cache of a request has still to travel before its second token."""
        return max(0.0, self.phases.options.transfer_s_per_token * request.prompt_tokens - request.travelled_s)

    def _to_pending(self, request: AdmissionRequest, now_s: float, phase: Phase | None = None) -> Pending:
        p = super()._to_pending(request, now_s, phase)
        if request.transferred_kv_tokens and not p.is_best_effort:
            make_due_earlier(p.row, self._transfer_s(request))
        return p

    def _admitted(self, p: Pending, replica: VirtualReplica, now_s: float) -> Decision:
        decision = super()._admitted(p, replica, now_s)
        if not p.request.transferred_kv_tokens:
            return decision
        gaps = max(1, decision.output_tokens - p.request.emitted_tokens)
        tpot_s = decision.predicted_tpot_s + self._transfer_s(p.request) / gaps
        return msgspec.structs.replace(decision, predicted_tpot_s=tpot_s)

    def _scores(self, row: np.ndarray, held_tokens: np.ndarray, phase: Phase | None) -> np.ndarray:
        """For prefills the idlest instead of what a rule of loads says, which counts decodes: prompts of all
        tiers are served there by deadline, and a first token that comes early is slack for the decode."""
        scores = super()._scores(row, held_tokens, phase)
        goes_by_rule = phase == Phase.PREFILL and not len(scores)
        return idlest(self.slots.fleet_state.replicas) if goes_by_rule else scores

    def _that_prefill(self, batch: Sequence[AdmissionRequest], now_s: float) -> dict[str, tuple[AdmissionRequest, int]]:
        """The new requests that prefill replicas are asked about: their prefill, and their predicted whole output.

        Room to decode each of them is reserved; best effort needs none.
        """
        by_phase = {phase: self._open_on(phase, now_s) for phase in Phase}
        if not all(by_phase.values()):
            return {}
        found = {}
        for request in batch:
            if not request.can_disaggregate or request.emitted_tokens:
                continue
            row = admission_row(request, self.tiers.of_request(request.slo), self.lengths, now_s)
            output_tokens = int(row["output_tokens"])
            part = prefill_part(request, output_tokens, self._transfer_s(request))
            is_in_time = part.slo.ttft_s > 0.0  # a KV cache may travel for longer than its line allows
            if request.slo.best_effort or (is_in_time and self._reserve(row, by_phase[Phase.DECODE], now_s)):
                self.allocation.record_arrival(row, now_s)  # as a whole: of its parts only the first would be counted
                found[request.request_id] = part, output_tokens
        split = {r.group for r in batch if r.group and r.request_id not in found}  # a request is in one phase
        for name in [name for name, part in found.items() if part[0].group in split]:
            self.room.release(self.slots, request_uid(name))
            del found[name]
        return found

    def _reserve(self, row: np.ndarray, name_of: Mapping[int, str], now_s: float) -> bool:
        """Keep room for the decode of a request, also on a replica that may join its tier; whether there was any."""
        names = set(self.allocation.candidates(int(row["tier"])))
        may_join = [slot for slot, name in name_of.items() if name in names]
        slot = decode_slot(self.slots.fleet_state, name_of, may_join, row, now_s)
        if slot == NOWHERE:
            return False
        self.room.reserve(self.slots, int(row["id"]), Reservation(name_of[slot], slot, ready_row(row), now_s))
        return True

    def _best_effort_or_refuse(self, p: Pending, now_s: float) -> Decision:
        """A request whose prompt is computed keeps its class: it goes to the idlest of its tier that has KV room, or
        waits for that; after ``HAND_OVER_S`` to the one with the most. To any other where its tier has none."""
        if p.is_best_effort or not p.request.transferred_kv_tokens:
            return super()._best_effort_or_refuse(p, now_s)
        fleet_state = self.slots.fleet_state
        state, is_usable = fleet_state.replicas, fleet_state.replicas["is_open"] & _suits(p, fleet_state.replicas)
        if not is_usable.any():
            is_usable = state["is_open"]
        fits = is_usable & has_kv_room(fleet_state, p.request.prompt_tokens + p.request.emitted_tokens)
        p.slot = best_scored(state, np.where(fits, idlest(state), -np.inf))
        if p.slot < 0 and self.options.pending and is_usable.any():
            pause_s = self.unplaced.hand_over_pause_s(p, now_s + HAND_OVER_S, now_s)
            if pause_s > 0.0:
                return self._unplaced(p, Verdict.PENDING, pause_s)
        if p.slot < 0:
            free_tokens = fleet_state.limits["kv_capacity_tokens"] - state["held_tokens"]
            p.slot = best_scored(state, np.where(is_usable, free_tokens, -np.inf))
        if p.slot < 0:
            return self._unplaced(p, Verdict.REFUSED, 0.0)
        self.slots.add(p.slot, p.row)
        return msgspec.structs.replace(self._admitted(p, self.by_slot[p.slot], now_s), reason=p.reason)


def _suits(p: Pending, state: np.ndarray) -> np.ndarray:
    """Which replicas (REPLICA_STATE[R]) serve the request's tier and have not failed it (bool[R])."""
    is_suited = np.array([tier_distance(int(tier), p.tier) >= 0 for tier in state["tier"]])
    return is_suited & (p.scores > -np.inf) if len(p.scores) else is_suited


def _of_whole(decision: Decision, request: AdmissionRequest) -> Decision:
    """A decision about a part of a request, with the TTFT of the whole."""
    return msgspec.structs.replace(decision, ttft_s=request.slo.ttft_s)


def make_fleet(options: FleetOptions, tiers: TierTable, load_profile: Callable[[str], Profile]) -> Fleet:
    """The fleet that the options ask for."""
    kind = DisaggregatedFleet if options.phases is not None else Fleet
    return kind(options, tiers, load_profile)
