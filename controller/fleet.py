"""The controller's state and its decisions; pure: time, randomness and messages are arguments.

Soft state: reports bring back all but the tier table and what was learnt (``controller.checkpoint``).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from controller import decisions, placement
from controller.binning import in_tiers
from controller.calibration import Calibration
from controller.disaggregation.phases import Phase
from controller.drift import note_drift
from controller.groups import decide_together, of_groups
from controller.held import Askers, HeldRequests
from controller.lengths.fleet_lengths import FleetLengths
from controller.mirror.locations import RequestLocations
from controller.mirror.prefix_affinity import Affinity
from controller.mirror.replica_model import VirtualReplica, admission_row, limits_of
from controller.mirror.slots import ReplicaSlots
from controller.mirror.views import views_of
from controller.options import FleetOptions
from controller.placement import Pending
from controller.programs.programs import Programs
from controller.returns import Returns
from controller.scaling.allocation import REBORN, Allocation
from controller.scaling.role import ReplicaView
from controller.scaling.tiers import TierTable
from controller.slowdown import with_ttft
from controller.tracker import Tracker
from controller.unplaced import START_PAUSE_S, Unplaced
from planning.tables import to_best_effort
from profiles.profile import Profile
from protocol.messages import AdmissionRequest, Decision, Outcome, Report, Scope, Verdict, request_uid
from routing.fleet_state import advance_fleet
from routing.policy import RoutingPolicy, make_routing, to_routing_request


@dataclass
class Fleet:
    """All virtual replicas, the tier table, and who got what."""

    options: FleetOptions
    tiers: TierTable
    load_profile: Callable[[str], Profile]
    replicas: dict[str, VirtualReplica] = field(default_factory=dict)
    tracker: Tracker = field(default_factory=Tracker)
    slots: ReplicaSlots = field(default_factory=ReplicaSlots)
    turn: int = 0
    by_slot: dict[int, VirtualReplica] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.lengths = FleetLengths(self.options.lengths, self.options.length_prior_tokens, self.tiers.length_priors)
        self.policy: RoutingPolicy = make_routing(self.options.routing)
        self.allocation = Allocation(self.options.allocation, self.tiers)
        self.unplaced = Unplaced(Returns(max(1, int(self.options.retry_cap_s))), self.lengths)
        self.affinity = Affinity(self.options.prefix_affinity, self.options.block_tokens, self.options.adapters)
        self._rng, self.places = np.random.default_rng(self.options.seed), RequestLocations(self.replicas)
        self.held = HeldRequests(self.places, self.options.pending and self.options.phases is None)
        self.calibration, self._has_joined = Calibration(), False  # whether a replica is without a role
        self.programs = Programs(self.options.programs, self.slots, self.options.admission)
        self.programs.is_anywhere = lambda uid: uid in self.places or uid in self.unplaced

    def adopt_state(self, other: "Fleet", now_s: float) -> None:
        """Take over what another fleet knows: the options have changed, perhaps the tier table too."""
        self.replicas, self.slots, self.by_slot = other.replicas, other.slots, other.by_slot
        self.tracker, self.places, self.calibration = other.tracker, other.places, other.calibration
        self.turn, self.held = other.turn, replace(other.held, may_hold=self.held.may_hold)
        self.unplaced.adopt_state(other.unplaced)
        self.lengths.adopt_state(other.lengths)
        self.programs.adopt_state(other.programs)
        self.affinity.adopt_counts(other.affinity)
        self._remap_tiers(other.tiers.tier_remap(self.tiers))
        self.allocation = other.allocation.under(self.options.allocation, self.tiers, now_s)
        self._allocate(now_s)

    def report(self, report: Report, now_s: float) -> bool:
        """A replica told its state; an unknown or reborn one joins. Whether all that it refers to is known."""
        self._forget(now_s)
        replica = self.replicas.get(report.replica)
        if is_new := replica is None or replica.incarnation != report.incarnation:
            profile, _ = self.load_profile(report.profile), limits_of(report)  # what fails here changes nothing
            if replica is not None:
                self._drop(replica, REBORN, now_s)
            replica = VirtualReplica(report, profile, self.slots, now_s)
            self.replicas[report.replica] = self.by_slot[replica.slot] = replica
        synced = replica.sync(report, self.lengths, self.tiers, self.calibration, now_s)
        self.places.follow(replica, synced.without(self.held.follow(replica, now_s)), now_s)
        self.held.forget(synced.gone)
        self._has_joined |= is_new
        if self.allocation.is_due(now_s, self._has_joined, len(self.replicas)):
            self._allocate(now_s)
        return synced.is_whole

    def set_tiers(self, tiers: TierTable, now_s: float) -> bool:
        """Apply a newer table in place; whether it was newer."""
        if tiers.version <= self.tiers.version and self.tiers.tiers:
            return False
        self._remap_tiers(self.tiers.tier_remap(tiers))
        self.tiers, self.lengths.tiers.tier_priors = tiers, tiers.length_priors
        self.allocation.set_table(tiers, now_s)
        self._allocate(now_s)
        return True

    def _remap_tiers(self, tier_remap: np.ndarray) -> None:
        """Tell requests their tiers in another table (``TierTable.tier_remap``), and have replicas tell them anew."""
        for replica in self.replicas.values():
            replica.remap_tiers(tier_remap)
        self.held.remap_tiers(tier_remap)
        self.unplaced.remap_tiers(tier_remap)

    def on_failed(self, replica: str, now_s: float) -> None:
        """An ingress saw this replica fail: no new requests until it is reborn or reports that its engine goes on."""
        if replica in self.replicas:
            self.replicas[replica].suspect_s = now_s

    def on_removed(self, replica: str, now_s: float) -> None:
        """A drained replica has been ended as the autoscaler asked: it is gone, not silent."""
        self.allocation.on_removed(replica, now_s)
        self.hand_over(replica, now_s, "drained and ended")

    def hand_over(self, replica: str, now_s: float, reason: str = "another controller has it") -> None:
        """Another controller has this replica from now on, or nobody."""
        self._give_up([name for name in (replica,) if name in self.replicas], reason, now_s)

    def on_outcome(self, outcome: Outcome, now_s: float) -> None:
        """A request ended: free its reservation, count it, learn its length. Or its first token is told."""
        if outcome.scope != Scope.REQUEST and not outcome.is_first_token:
            self.unplaced.leave(uid := request_uid(outcome.request_id))
            self.held.free(uid)
        self.calibration.note(outcome, self.tiers)
        if outcome.is_first_token:
            return  # it goes on
        self.tracker.note(outcome, now_s)
        self.programs.on_outcome(outcome, now_s)
        told = None if outcome.scope == Scope.REQUEST else self.lengths.learn(outcome)
        if note_drift(self.tracker.drift, outcome, told, self.allocation.history, now_s):
            self.lengths.learn_anew()

    def admit(self, batch: Sequence[AdmissionRequest], now_s: float, by: Askers = "") -> list[Decision]:
        """Place what the fleet can promise, by at most ``max_hops`` exact checks each (SLOs-Serve sections 3.1, 4.2);
        the rest waits, is served best effort, or is refused. Who asks, ``by``, hears of recalls (``held``)."""
        batch = self._prepare(batch, now_s, self.slots.lag_s)
        waiting = self.programs.without_place(batch, now_s)
        decided = iter(self._decide([r for r in batch if r.request_id not in waiting], now_s, by, None))
        return self.programs.told([waiting.get(request.request_id) or next(decided) for request in batch], now_s)

    def _prepare(self, batch: Sequence[AdmissionRequest], now_s: float, lag_s: float) -> list[AdmissionRequest]:
        """The questions with all settled that they leave open; roles as of now, mirrors at most ``lag_s`` behind."""
        self._open(now_s)
        settled = in_tiers(self.programs.give_stages(with_ttft(batch, self.replicas), now_s), self.tiers, self.lengths)
        advance_fleet(self.slots.fleet_state, now_s, False, lag_s)
        return settled

    def _decide(self, batch: list[AdmissionRequest], now_s: float, by: Askers, phase: Phase | None) -> list[Decision]:
        """Decide among the replicas that are open; ``phase``: the part of the requests in question."""
        self.slots.allocate(len(batch))
        earlier = {u for r in batch if (u := request_uid(r.request_id)) in self.unplaced.waiting or u in self.held}
        checks, pending = self.options.admission and self.policy.checks_admission, []
        for request in batch:
            pending.append(p := self._to_pending(request, now_s, phase))
            p.ingress = by if isinstance(by, str) else by[request.request_id]
            if not checks and not p.is_best_effort:
                counts_held = self.policy.counts_held and not request.adapter
                placement.place_without_check(self.slots, p, 0.0 if counts_held else self.affinity.strength, now_s)
        asking, together = of_groups([p for p in pending if checks and not p.is_best_effort])
        open_fleet = placement.PlacementFleet(self.slots, self.allocation, self.replicas, self.options)
        self.unplaced.receive(self.slots, [*asking, *(each[0] for each in together)], earlier, now_s)
        self.programs.place_at_home(asking, now_s)
        placement.place_each(open_fleet, asking, earlier, self.affinity.strength, now_s)
        self.programs.place_late(open_fleet, asking, now_s)
        self.held.displace(open_fleet, self.by_slot, [p for p in asking if int(p.row["id"]) not in earlier], now_s)
        fall_back = partial(self._best_effort_or_refuse, now_s=now_s)
        known = decide_together(open_fleet, together, now_s, fall_back)
        self.unplaced.returns.charge(self.slots, now_s)
        known |= {p.request.request_id: self._admit_or_hold(p, now_s) for p in pending if p.slot >= 0}
        return [known.get(p.request.request_id) or fall_back(p) for p in pending]

    def _admit_or_hold(self, p: Pending, now_s: float) -> Decision:
        """Send a placed request, or keep it back while it could not begin."""
        self.allocation.record_arrival(p.row, now_s)
        if (wait_s := self.held.wait_s(p, self.by_slot[p.slot], now_s)) > 0.0:
            self.held.hold(p, self.by_slot[p.slot], now_s)
            self.unplaced.leave(int(p.row["id"]))
            return self._unplaced(p, Verdict.PENDING, wait_s)
        self.held.send(p)
        return self._admitted(p, self.by_slot[p.slot], now_s)

    def live(self, now_s: float) -> list[VirtualReplica]:
        """Replicas that may take requests (``open_slots``)."""
        is_open = self.open_slots(now_s)
        return [replica for replica in self.replicas.values() if is_open[replica.slot]]

    def open_slots(self, now_s: float, phase: Phase | None = None) -> np.ndarray:
        """Slots that may take requests (bool[R], ``ReplicaSlots.usable``), or this phase of them."""
        closed = [self.replicas[name].slot for name in self.allocation.draining if name in self.replicas]
        return self.slots.usable(closed, now_s, self.options.silent_s, self.options.forget_s)

    def _open(self, now_s: float, phase: Phase | None = None) -> None:
        if self._has_joined:
            self._allocate(now_s)
        self.slots.fleet_state.replicas["is_open"] = self.open_slots(now_s, phase)

    def _to_pending(self, request: AdmissionRequest, now_s: float, phase: Phase | None = None) -> Pending:
        """The request as a row with its scores; its earlier place is freed, as of a resumed stream or a retry."""
        uid, tier, self.turn = request_uid(request.request_id), self.tiers.of_request(request.slo), self.turn + 1
        is_first = not (request.emitted_tokens or uid in self.unplaced or uid in self.held)
        self.held.free(uid)
        row = admission_row(request, tier, self.lengths, now_s)
        row["value"] = self.tiers.value(tier) * self.programs.worth(request)
        margin_s = self.calibration.plan_early(row, self.tiers, is_first, now_s)
        held, cached = self.affinity.look_up(request, row, self.replicas, self.slots.fleet_state)
        scores = self._scores(row, self.affinity.held_prompt(request, held), phase)
        p = Pending(request, tier, row, scores, self.policy.rule, held, cached, margin_s=margin_s, phase=phase)
        if excluded := self.affinity.excluded(request, self.replicas):
            p.exclude_where_others_are(self.slots, excluded, now_s)
        if not request.may_hop:  # where it finds room it is counted as well
            self.allocation.record_arrival(row, now_s)
        return p

    def _scores(self, row: np.ndarray, held_tokens: np.ndarray, phase: Phase | None) -> np.ndarray:
        request = to_routing_request(row, held_tokens)
        return self.policy.score(request, self.slots.fleet_state.replicas, self.turn, self._rng)

    def _settle(self, p: Pending, replica: VirtualReplica, now_s: float) -> None:
        """Note the place that a request was given."""
        self.places.reconcile(int(p.row["id"]), replica, now_s)
        self.affinity.record(p.request, replica, int(p.row["output_tokens"]), p.computed_tokens_at(replica.slot))

    def _admitted(self, p: Pending, replica: VirtualReplica, now_s: float) -> Decision:
        self._settle(p, replica, now_s)
        self.unplaced.leave(int(p.row["id"]))
        return decisions.admitted(p, replica, self.tiers.tiers[p.tier].name if self.tiers.tiers else p.request.slo.tier)

    def _best_effort_or_refuse(self, p: Pending, now_s: float) -> Decision:
        """Wait for room, go best effort to the replica with the least to do, or a refusal that says when to return."""
        if self.programs.place_promised(p, now_s):
            return self._admitted(p, self.by_slot[p.slot], now_s)
        if p.request.may_hop:
            return self._unplaced(p, Verdict.ELSEWHERE, 0.0)
        if (pause_s := self.unplaced.news_s(self.slots, p, self.options.silent_s, now_s)) > 0.0:
            return self._unplaced(p, Verdict.PENDING, pause_s)
        asked_best_effort, may_wait = p.is_best_effort, p.is_new and not p.is_best_effort
        refuses = may_wait and self.tiers.refuses(p.tier, self.options.unattainable)
        may_wait = may_wait and self.options.pending and self.unplaced.may_wait(p, refuses)
        if may_wait and (pause_s := self.unplaced.pause_s(self.slots, p, now_s)) > 0.0:
            return self._unplaced(p, Verdict.PENDING, pause_s)
        if refuses:
            return self._unplaced(p, *self.unplaced.refusal(self.slots, p, now_s))
        free = self.unplaced.places(self.slots, p, self.options.best_effort_backlog)
        if p.is_new and self.slots.is_any_open and (wait_s := self.unplaced.line_s(p, free, self.programs, now_s)) > 0:
            return self._unplaced(p, Verdict.PENDING, wait_s)
        slot = placement.idlest_slot(self.slots, p, free > 0 if p.is_new else free >= 0)
        if slot < 0 and asked_best_effort and self.allocation.autoscaler and self.unplaced.awaits_start(p, now_s):
            return self._unplaced(p, Verdict.PENDING, START_PAUSE_S)
        self.unplaced.leave(int(p.row["id"]))
        if slot < 0:
            return decisions.unplaced(p, Verdict.REFUSED, "no_replica", 0.0)
        to_best_effort(p.row)
        self.slots.add(slot, p.row_at(slot))
        self._settle(p, replica := self.by_slot[slot], now_s)
        return decisions.best_effort(p, replica.name, None if asked_best_effort else self.tiers.best_effort_name)

    def _unplaced(self, p: Pending, verdict: Verdict, wait_s: float) -> Decision:
        return decisions.unplaced(p, verdict, p.reason if self.slots.is_any_open else "no_replica", wait_s)

    def _allocate(self, now_s: float) -> None:
        self.allocation.step(self.views(now_s), now_s)
        self.allocation.write_roles(self.replicas, self._has_joined)
        self._has_joined = False

    def _forget(self, now_s: float) -> None:
        """Give up replicas that are gone, and pending requests that ask no more."""
        gone = self.slots.gone(now_s, self.options.silent_s, self.options.forget_s)
        self._give_up([self.by_slot[slot].name for slot in gone], "", now_s)
        self.unplaced.forget(now_s)

    def _give_up(self, names: Sequence[str], reason: str, now_s: float) -> None:
        for name in names:
            self._drop(self.replicas.pop(name), reason, now_s)
        if names:
            self._allocate(now_s)

    def _drop(self, replica: VirtualReplica, reason: str, now_s: float) -> None:
        """Forget what a replica held: it is gone or reborn. Without a reason, nobody said why."""
        self.allocation.note_gone(replica, reason, now_s)
        self.held.forget(self.places.forget(replica))
        self.slots.release(replica.slot)
        self.unplaced.returns.forget(self.by_slot.pop(replica.slot).slot)

    def views(self, now_s: float) -> list[ReplicaView]:
        """What roles and size are decided by, in order of names."""
        return views_of(self.replicas, self.slots, self.tiers.pool, self.slots.are_live(now_s, self.options.silent_s))

    def check_integrity(self) -> None:
        """Every request is where it was noted, and every replica's table is sound."""
        self.places.check_integrity()
