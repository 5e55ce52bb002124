"""The mirror of one replica: reports become planning rows, and the performance model advances them in between."""

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from controller.calibration import Calibration
from controller.mirror.lengths import LengthEstimator
from controller.mirror.slots import ReplicaSlots
from controller.scaling.role import ReplicaView
from controller.scaling.tiers import TierTable
from planning.batch.classes import spare_s
from planning.deadlines import make_due_earlier
from planning.engine import EngineModel
from planning.limits import LIMITS, make_limits
from planning.tables import BOUNDS, REQUEST, request_table, set_objective, to_best_effort
from profiles.online import corrected, drift, new_correction, observe_steps
from profiles.profile import Profile
from protocol.messages import AdmissionRequest, Progress, Report, Slo, Step, request_uid
from routing.prefix_index import PrefixIndex

MOST_CAUTION = 0.5  # a model that errs by more has other problems than a margin could solve
RESERVED_S = 3.0  # a reservation that no report confirms by then was lost on its way
DOUBT_S = 1.5  # a report that comes so soon after a failure was seen may be older than the failure
STUCK_S, STUCK_TIMES = 1.0, 4.0  # an iteration so long, and so many times the longest lately, does not go on
LONGEST_FADES = 0.99  # from one report to the next
REPORTED_LIMITS = tuple(name for name in LIMITS.names or () if name in Report.__struct_fields__)
LONGEST_S = 1.5  # an iteration that takes longer stands still: nothing else is imagined to have run meanwhile


class VirtualReplica:
    """State of one replica as far as it is known: a slot of ``ReplicaSlots``, and what kernels need not see.

    Every time is on the controller's clock.
    """

    def __init__(self, report: Report, profile: Profile, slots: ReplicaSlots, now_s: float) -> None:
        self.name, self.incarnation, self.profile = report.replica, report.incarnation, profile
        self.slots, self.slot = slots, slots.take()
        self._correction = new_correction(np.array(profile.coefficients))
        self.sequence, self.seen_s, self.moved_s = -1, now_s, now_s
        self.is_stuck, self._longest_s = False, report.max_iteration_s
        self.draining, self.suspect_s, self.pid = report.draining, -np.inf, report.pid
        self.phase = report.phase
        self.kv_used_tokens, self.planner_failures = report.kv_used_tokens, report.planner_failures
        self.counts = report.counts
        fleet_state = slots.fleet_state
        fleet_state.coefs[self.slot] = fleet_state.pessimistic_coefs[self.slot] = profile.coefficients
        fleet_state.replicas["free_at_s"][self.slot] = now_s
        fleet_state.limits[self.slot] = limits_of(report)
        self.prefixes = PrefixIndex(report.kv_capacity_tokens)
        self._reserved_s: dict[int, float] = {}  # requests decided for this replica that no report has shown yet

    # -- what changes it --------------------------------------------------------------------------------------------

    def sync(
        self, report: Report, lengths: LengthEstimator, tiers: TierTable, calibration: Calibration, now_s: float
    ) -> set[int]:
        """Replace the model's guess by what the replica says; reservations it cannot know of yet stay.

        Returns the requests that have left its table: those that ended, and reservations that were lost.
        """
        if report.sequence <= self.sequence:
            return set()  # overtaken on the way
        self.sequence, self.seen_s, self.draining = report.sequence, now_s, report.draining
        self.moved_s = now_s - report.iteration_age_s  # began its iteration in flight, or is idle
        self._note_standstill(report)
        self.kv_used_tokens, self.planner_failures = report.kv_used_tokens, report.planner_failures
        self.counts = report.counts
        self._limit(report)
        self._correct(report.steps)
        rows = progress_rows(report.requests, lengths, tiers, now_s)
        self._keep_margins(rows, calibration.margins_s(rows, tiers), now_s)
        ended = [request_uid(request_id) for request_id, _ in report.finished]
        for uid in (*rows["id"].tolist(), *ended):
            self._reserved_s.pop(uid, None)
        self._reserved_s = {uid: since_s for uid, since_s in self._reserved_s.items() if self.has(uid, now_s)}
        before, waiting = self.table["id"].tolist(), self.table[np.isin(self.table["id"], list(self._reserved_s))]
        self.state["free_at_s"] = now_s - min(report.iteration_age_s, LONGEST_S)
        self.slots.put(self.slot, np.concatenate([rows, waiting]))
        return set(before).difference(self.table["id"].tolist())

    def _keep_margins(self, rows: np.ndarray, margins_s: np.ndarray, now_s: float) -> None:
        """Plan what it serves as much earlier than asked as newcomers were, so that those do not use the margin up; by
        half of what is left where that is less, so that no request looks late that is not."""
        if margins_s.any():
            left_s = spare_s(EngineModel(self.pessimistic_coefs, self.limits), rows, now_s)
            make_due_earlier(rows, np.minimum(margins_s, 0.5 * left_s))

    def _note_standstill(self, report: Report) -> None:
        """An iteration that takes far longer than those before it: the engine is frozen, or compiles something."""
        usual_s = [self._longest_s * LONGEST_FADES, *(step.seconds for step in report.steps)]
        self._longest_s = max(usual_s)
        self.is_stuck = report.iteration_age_s > max(STUCK_S, STUCK_TIMES * self._longest_s)

    def _limit(self, report: Report) -> None:
        """Follow the engine where it is told to keep to other limits; the slack margin is learnt here."""
        limits = limits_of(report)
        limits["slack_margin"] = self.limits["slack_margin"]
        self.slots.fleet_state.limits[self.slot] = limits

    def _correct(self, steps: Iterable[Step]) -> None:
        """Move the coefficients by measured iterations (slope and intercept apart)."""
        measured = np.array([msgspec.structs.astuple(step) for step in steps], dtype=np.float64)
        if len(measured):
            self._correction = observe_steps(self._correction, self.profile.coefficients, measured)
            coefficients = corrected(self.profile.coefficients, self._correction)
            seen = drift(self._correction, self.profile.coefficients)
            self.slots.fleet_state.coefs[self.slot] = coefficients
            self.slots.fleet_state.pessimistic_coefs[self.slot] = coefficients * (1.0 + min(seen.error, MOST_CAUTION))
            self.limits["slack_margin"] = seen.reach  # as in the engine's own planner

    def record_reserved(self, uid: int, now_s: float) -> None:
        """A request was added to its rows before the replica has reported it."""
        self._reserved_s[uid] = now_s

    def release(self, uid: int) -> None:
        """Forget a request that ended or went elsewhere."""
        self.slots.remove(self.slot, uid)
        self._reserved_s.pop(uid, None)

    # -- what it tells ----------------------------------------------------------------------------------------------

    @property
    def table(self) -> np.ndarray:
        """Its requests (REQUEST[n], a view), as they will be at the end of the iteration in flight."""
        return self.slots.rows(self.slot)

    @property
    def state(self) -> np.ndarray:
        """Its record and cached sums (REPLICA_STATE[], a view)."""
        return self.slots.fleet_state.replicas[self.slot : self.slot + 1]

    @property
    def limits(self) -> np.void:
        return self.slots.fleet_state.limits[self.slot]

    @property
    def pessimistic_coefs(self) -> np.ndarray:
        """Coefficients by which promises are made: the model's own measured error on top."""
        coefficients: np.ndarray = self.slots.fleet_state.pessimistic_coefs[self.slot]
        return coefficients

    def is_live(self, now_s: float, silent_s: float) -> bool:
        """Whether it reported within ``silent_s`` and, since an ingress last saw it fail, that its engine goes on.

        An iteration may take long; but where an ingress has given up, only one that began later says that the
        engine does not stand still, however punctual the reports are.
        """
        return now_s - self.seen_s <= silent_s and self.moved_s - self.suspect_s > DOUBT_S

    def has(self, uid: int, now_s: float) -> bool:
        """Whether a request of its table was reported by it, or may still be on its way to it."""
        return now_s - self._reserved_s.get(uid, now_s) <= RESERVED_S

    def view(self, tiers: int, now_s: float, silent_s: float) -> ReplicaView:
        """What its role is decided by; ``tiers`` have an objective."""
        table, state = self.table, self.state[0]
        held = np.bincount(table["tier"][~table["best_effort"]].clip(0), minlength=tiers)[:tiers]
        is_reporting = self.is_live(now_s, silent_s) and not self.draining
        return ReplicaView(
            self.name, tuple(held.tolist()), int(state["best_effort"]), float(state["load"]), is_reporting
        )

    def drift(self) -> dict[str, float]:
        """How far the measured iterations have moved from the profile."""
        return {k: float(v) for k, v in drift(self._correction, self.profile.coefficients)._asdict().items()}

    def check_integrity(self) -> None:
        """Every request once; every reservation a row of the table."""
        ids = self.table["id"].tolist()
        if len(set(ids)) != len(ids):
            raise AssertionError(f"replica {self.name}: a request is in its table twice")
        if not set(self._reserved_s) <= set(ids):
            raise AssertionError(f"replica {self.name}: a reservation without a row")


def limits_of(report: Report) -> np.void:
    """What bounds an engine's iterations (LIMITS[]), as it says."""
    return make_limits(**{name: getattr(report, name) for name in REPORTED_LIMITS})


def admission_row(request: AdmissionRequest, tier: int, lengths: LengthEstimator, now_s: float) -> np.ndarray:
    """A new request of value 1 as a planning row (0-d structured array of dtype REQUEST)."""
    slo, row = request.slo, np.zeros((), dtype=REQUEST)
    _fill_slo(row, slo, request.age_s, now_s)
    row["id"], row["tier"], row["value"] = request_uid(request.request_id), tier, 1.0
    row["prompt_tokens"], row["emitted_tokens"] = request.prompt_tokens, request.emitted_tokens
    row["output_cap_tokens"] = request.max_tokens
    row["output_tokens"] = lengths.predict(slo.tier, request.emitted_tokens, request.max_tokens, request.tenant)
    if request.transferred_kv_tokens:  # its prompt is computed: it goes on decoding at once
        row["computed_tokens"], row["running"] = request.prompt_tokens + request.emitted_tokens - 1, True
    return row


def progress_rows(requests: Sequence[Progress], lengths: LengthEstimator, tiers: TierTable, now_s: float) -> np.ndarray:
    """Reported requests as a planning table, column by column: several times a second for every replica there is."""
    table, slos = request_table(len(requests)), [seen.slo for seen in requests]
    for name in ("prompt_tokens", "computed_tokens", "emitted_tokens", "output_cap_tokens", "running"):
        table[name] = [getattr(seen, name) for seen in requests]
    table["id"] = [request_uid(seen.request_id) for seen in requests]
    table["tier"] = [tiers.of_request(slo) for slo in slos]
    table["value"] = tiers.values[table["tier"]]
    table["best_effort"] = [slo.best_effort for slo in slos]
    ages_s = np.array([seen.age_s for seen in requests])
    ttft_s, tpot_s, e2e_s = np.array([(s.ttft_s, s.tpot_s, s.e2e_s) for s in slos]).reshape(-1, 3).T
    set_objective(table, now_s - ages_s, ttft_s, tpot_s, e2e_s)
    for name in BOUNDS:
        table[name][table["best_effort"]] = np.inf
    table["output_tokens"] = [_expected_tokens(seen, lengths) for seen in requests]
    return table


def _expected_tokens(seen: Progress, lengths: LengthEstimator) -> int:
    """What was predicted when the request was decided, which knew its tenant; until it has outlived that."""
    told = min(seen.output_tokens, seen.output_cap_tokens)
    if told > seen.emitted_tokens:
        return told
    return lengths.predict(seen.slo.tier, seen.emitted_tokens, seen.output_cap_tokens)


def _fill_slo(row: np.ndarray, slo: Slo, age_s: float, now_s: float) -> None:
    set_objective(row, now_s - age_s, slo.ttft_s, slo.tpot_s, slo.e2e_s)
    row["best_effort"] = slo.best_effort
    if slo.best_effort:
        to_best_effort(row)
