"""The controller's state and its decisions; pure: time, randomness and messages are arguments.

Soft state only: everything but the tier table comes back from the replicas' own reports.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from controller.lengths import LengthEstimator
from controller.tiers import TierTable
from controller.tracker import Tracker
from controller.virtual import VirtualReplica, admission_row
from controller.wire import Admission, Decision, Outcome, Report, Verdict, request_uid
from planning.admission import AdmissionOptions, plan_admission
from profiles.profile import Profile
from routing.policy import SHARED, Ask, Candidate, RoutingPolicy, make_routing


class FleetOptions(msgspec.Struct, frozen=True):
    """How the fleet is run, from the configuration."""

    routing: str = "slo"
    admission: bool = True  # off: the routing policy's first choice takes the request unchecked
    max_hops: int = 4  # replicas that a request may try before it is served best effort or refused
    unattainable: str = "best_effort"  # or "refuse", where a tier does not say
    silent_s: float = 1.5  # a replica that has not reported for so long takes no new requests
    forget_s: float = 30.0
    length_prior_tokens: float = 256.0
    retry_cap_s: float = 30.0
    seed: int = 0


@dataclass
class Pending:
    """A request on its way through the replicas it may try."""

    ask: Admission
    tier: int
    row: np.ndarray
    tries: list[int]
    hops: int = 0
    reason: str = "no_replica"
    decision: Decision | None = None

    @property
    def is_best_effort(self) -> bool:
        return bool(self.row["best_effort"])


@dataclass
class Fleet:
    """All virtual replicas, the tier table, and who got what."""

    options: FleetOptions
    tiers: TierTable
    load_profile: Callable[[str], Profile]
    replicas: dict[str, VirtualReplica] = field(default_factory=dict)
    tracker: Tracker = field(default_factory=Tracker)
    turn: int = 0

    def __post_init__(self) -> None:
        self.lengths = LengthEstimator(self.options.length_prior_tokens)
        self.policy: RoutingPolicy = make_routing(self.options.routing)
        self._retry = AdmissionOptions(retry_after=True, horizon_s=self.options.retry_cap_s)
        self._rng = np.random.default_rng(self.options.seed)
        self._assigned: dict[str, int] = {}
        self._where: dict[int, str] = {}  # request -> replica it was sent to

    # -- inputs -----------------------------------------------------------------------------------------------------

    def report(self, report: Report, now_s: float) -> None:
        """A replica told its state; an unknown or reborn one joins."""
        known = self.replicas.get(report.replica)
        if known is None or known.birth != report.birth:
            self.replicas[report.replica] = VirtualReplica(report, self.load_profile(report.profile), now_s)
        replica = self.replicas[report.replica]
        replica.sync(report, self.lengths, now_s)
        for uid in replica.table["id"].tolist():
            if self._where.setdefault(uid, report.replica) != report.replica:
                replica.release(uid)  # a stream that moved elsewhere; this replica will hear of it
        self._reassign(now_s)

    def set_tiers(self, tiers: TierTable, now_s: float) -> bool:
        """Apply a newer table in place; whether it was newer."""
        if tiers.version <= self.tiers.version and self.tiers.tiers:
            return False
        self.tiers = tiers
        self._assigned = {}
        self._reassign(now_s)
        return True

    def note_failed(self, replica: str, now_s: float) -> None:
        """A door saw this replica fail: no new requests until it is reborn or has been silent and came back."""
        if replica in self.replicas:
            self.replicas[replica].suspect_s = now_s

    def note_outcome(self, outcome: Outcome, now_s: float) -> None:
        """A request ended: count it, learn its length, free its reservation."""
        self.tracker.note(outcome, now_s)
        if outcome.finish == "stop" or outcome.finish == "length":
            self.lengths.note(outcome.tier_asked, outcome.output_tokens)
        uid = request_uid(outcome.request_id)
        holder = self._where.pop(uid, None)
        if holder in self.replicas:
            self.replicas[holder].release(uid)

    # -- decisions --------------------------------------------------------------------------------------------------

    def admit(self, batch: Sequence[Admission], now_s: float) -> list[Decision]:
        """Decide requests that arrived together: each replica picks the best set of those that try it, the others
        go to their next replica (SLOs-Serve sections 3.1 and 4.2), up to ``max_hops``; then best effort or refusal."""
        live = self.live(now_s)
        for replica in live.values():
            replica.advance(now_s)
        checks = self.options.admission and self.policy.checks_admission
        pending = []
        for ask in batch:
            pending.append(p := self._pend(ask, live, now_s))
            if p.tries and not checks and not p.is_best_effort:
                p.decision = self._take(p, live[p.tries[0]], now_s)
        trying = [p for p in pending if p.tries and p.decision is None and not p.is_best_effort]
        while trying:
            trying = self._round(trying, live, now_s)
        return [p.decision or self._fall_back(p, live, now_s) for p in pending]

    def live(self, now_s: float) -> dict[int, VirtualReplica]:
        """Replicas that may take requests, by position in name order.

        Where none has reported lately, those that have not been given up: late reports are no proof of death.
        """
        known = {i: self.replicas[name] for i, name in enumerate(sorted(self.replicas))}
        usable = {i: r for i, r in known.items() if not r.draining}
        alive = {i: r for i, r in usable.items() if r.is_live(now_s, self.options.silent_s)}
        return alive or {i: r for i, r in usable.items() if r.is_live(now_s, self.options.forget_s)}

    def _pend(self, ask: Admission, live: dict[int, VirtualReplica], now_s: float) -> Pending:
        tier = self.tiers.index(ask.slo.tier)
        candidates = self._candidates(live, ask.exclude)
        self.turn += 1
        question = Ask(tier, ask.prompt_tokens + ask.emitted_tokens, ask.slo.best_effort)
        tries = self.policy.order(question, candidates, self.turn, self._rng)[: self.options.max_hops]
        return Pending(ask, tier, admission_row(ask, tier, self.lengths, now_s), tries)

    def _candidates(self, live: dict[int, VirtualReplica], exclude: Sequence[str]) -> list[Candidate]:
        usable = {i: r for i, r in live.items() if r.name not in exclude} or live
        return [r.candidate(i, self.tier_of(r.name)) for i, r in usable.items()]

    def _round(self, trying: list[Pending], live: dict[int, VirtualReplica], now_s: float) -> list[Pending]:
        """One hop: every replica decides about the requests that try it now; those refused try the next one."""
        visits: dict[int, list[Pending]] = {}
        for p in trying:
            visits.setdefault(p.tries[p.hops], []).append(p)
        refused = []
        for index, visitors in visits.items():
            refused += self._visit(visitors, live[index], now_s)
        for p in refused:
            p.hops += 1
        return [p for p in refused if p.hops < len(p.tries)]

    def _visit(self, visitors: list[Pending], replica: VirtualReplica, now_s: float) -> list[Pending]:
        rows = np.array([p.row for p in visitors])
        plan = plan_admission(replica.cautious, replica.limits, replica.table, rows, replica.free_at_s)
        refused = []
        for k, p in enumerate(visitors):
            if not plan.accepted[k]:
                p.reason = plan.reasons[k].value
                refused.append(p)
                continue
            predicted = float(plan.predicted_ttft_s[k]), float(plan.predicted_tpot_s[k])
            p.decision = self._place(p, replica, now_s, "attainable", predicted)
        return refused

    def _take(self, p: Pending, replica: VirtualReplica, now_s: float) -> Decision:
        """Admission is off: the policy's first choice it is, with no prediction."""
        return self._place(p, replica, now_s, "admission_off", (np.inf, np.inf))

    def _place(
        self, p: Pending, replica: VirtualReplica, now_s: float, reason: str, predicted: tuple[float, float]
    ) -> Decision:
        """Reserve room for the request as it asked; ``predicted`` is its TTFT and TPOT in seconds."""
        self._reserve(p.row, replica, now_s)
        return Decision(
            p.ask.request_id,
            Verdict.ADMITTED,
            replica.name,
            self.tiers.tiers[p.tier].name if self.tiers.tiers else p.ask.slo.tier,
            reason,
            *predicted,
            hops=p.hops,
            output_tokens=int(p.row["output_tokens"]),
        )

    def _reserve(self, row: np.ndarray, replica: VirtualReplica, now_s: float) -> None:
        uid = int(row["id"])
        held = self._where.get(uid)
        if held in self.replicas:  # a stream that resumes, or a client's retry: one place at a time
            self.replicas[held].release(uid)
        replica.reserve(row, now_s)
        self._where[uid] = replica.name

    def _fall_back(self, p: Pending, live: dict[int, VirtualReplica], now_s: float) -> Decision:
        """Best effort on the replica with the least to do, or a refusal that says when to come back."""
        if not live:
            return Decision(p.ask.request_id, Verdict.REFUSED, "", p.ask.slo.tier, "no_replica")
        asked_best_effort = p.is_best_effort
        if not asked_best_effort and p.ask.emitted_tokens == 0 and self._refuses(p.tier):
            wait_s = self._wait_s(p, live, now_s)
            return Decision(
                p.ask.request_id,
                Verdict.REFUSED,
                "",
                p.ask.slo.tier,
                p.reason,
                hops=p.hops,
                retry_after_s=wait_s,
            )
        replica = self._least_busy(p, live)
        row = p.row.copy()
        row["best_effort"], row["ttft_s"], row["tpot_s"], row["deadline_s"] = True, np.inf, np.inf, np.inf
        self._reserve(row, replica, now_s)
        reason = "best_effort" if asked_best_effort else p.reason
        return Decision(
            p.ask.request_id,
            Verdict.ADMITTED if asked_best_effort else Verdict.BEST_EFFORT,
            replica.name,
            p.ask.slo.tier if asked_best_effort else self._best_effort_tier(),
            reason,
            hops=p.hops,
            output_tokens=int(row["output_tokens"]),
        )

    def _wait_s(self, p: Pending, live: dict[int, VirtualReplica], now_s: float) -> float:
        """When to come back, as foreseen and at most the cap; 0 (unsaid) for what no idle replica could do."""
        tries = [live[index] for index in p.tries]
        plans = [plan_admission(r.cautious, r.limits, r.table, p.row[None], r.free_at_s, self._retry) for r in tries]
        earliest_s = min((float(plan.earliest_s[0]) for plan in plans), default=np.inf)
        if earliest_s < np.inf:
            return min(max(earliest_s - now_s, 0.0), self.options.retry_cap_s)
        fresh = p.row.copy()
        fresh["deadline_s"] += now_s - fresh["arrival_s"]
        fresh["arrival_s"] = now_s
        idle = np.zeros(0, dtype=fresh.dtype)
        could = any(plan_admission(r.coefficients, r.limits, idle, fresh[None], now_s).accepted[0] for r in tries)
        return self.options.retry_cap_s if could else 0.0

    def _least_busy(self, p: Pending, live: dict[int, VirtualReplica]) -> VirtualReplica:
        candidates = self._candidates(live, p.ask.exclude)
        chosen = min(candidates, key=lambda c: (c.backlog_tokens, c.requests, c.index))
        return live[chosen.index]

    def _refuses(self, tier: int) -> bool:
        named = self.tiers.tiers[tier].unattainable if self.tiers.tiers else ""
        return (named or self.options.unattainable) == "refuse"

    def _best_effort_tier(self) -> str:
        return next((tier.name for tier in self.tiers.tiers if tier.best_effort), "best_effort")

    def _reassign(self, now_s: float) -> None:
        gone = [n for n, r in self.replicas.items() if now_s - r.seen_s > self.options.forget_s]
        for name in gone:
            del self.replicas[name]
        if gone or set(self._assigned) != set(self.replicas):
            self._assigned = self.tiers.assign(list(self.replicas))
            self._where = {uid: name for uid, name in self._where.items() if name in self.replicas}

    # -- what it tells ----------------------------------------------------------------------------------------------

    def tier_of(self, replica: str) -> int:
        """Position of the tier that a replica is dedicated to, ``SHARED`` for none."""
        return self._assigned.get(replica, SHARED)

    def check_integrity(self) -> None:
        """Every request is on at most one replica, and every replica's table is sound."""
        seen: set[int] = set()
        for replica in self.replicas.values():
            replica.check_integrity()
            ids = set(replica.table["id"].tolist())
            if ids & seen:
                raise AssertionError(f"requests on two replicas: {sorted(ids & seen)[:5]}")
            seen |= ids
