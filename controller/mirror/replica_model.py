"""The mirror of one replica: reports become planning rows, and the performance model advances them in between."""

from collections.abc import Collection, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from controller.calibration import Calibration
from controller.lengths.fleet_lengths import FleetLengths
from controller.mirror.adapters import HeldAdapters
from controller.mirror.correction import Correction
from controller.mirror.reported import ReportedRequests, only_in
from controller.mirror.slots import ReplicaSlots
from controller.mirror.told_prefixes import ToldPrefixes
from controller.scaling.tiers import TierTable
from planning.batch.classes import spare_s
from planning.deadlines import make_due_earlier
from planning.engine import EngineModel
from planning.lead import formed_ahead_s
from planning.limits import LIMITS, make_limits
from planning.tables import REQUEST, has_begun, set_objective, stacked, to_best_effort
from profiles.profile import Profile
from protocol.messages import AdmissionRequest, Report, Slo, request_uid
from routing.prefix_index import PrefixIndex

RESERVED_S = 3.0  # a reservation that no report confirms by then was lost on its way
STUCK_S, STUCK_TIMES = 1.0, 4.0  # an iteration so long, and so many times the longest lately, does not go on
LONGEST_FADES = 0.99  # from one report to the next
REPORTED_LIMITS = tuple(name for name in LIMITS.names or () if name in Report.__struct_fields__)
_reported_limits = attrgetter(*REPORTED_LIMITS)
LONGEST_S = 1.5  # an iteration that takes longer stands still: nothing else is imagined to have run meanwhile


class Synced(NamedTuple):
    """What a report changed in the table of its replica: requests by uid."""

    gone: Sequence[int] = ()  # ended, or reservations that were lost
    came: Sequence[int] = ()
    is_whole: bool = True  # everything that it referred to was known

    def without(self, uids: Collection[int]) -> "Synced":
        """The same but for newcomers that do not count."""
        return self._replace(came=[uid for uid in self.came if uid not in uids]) if uids else self


def _liveness(name: str, told: str) -> Any:
    """A field of ``LIVENESS`` as a property of the replica that has the slot."""

    def read(self: "VirtualReplica") -> Any:
        return self.slots.liveness[name][self.slot].item()

    def write(self: "VirtualReplica", value: Any) -> None:
        self.slots.liveness[name][self.slot] = value

    return property(read, write, doc=told)


class VirtualReplica:
    """State of one replica as far as it is known: a slot of ``ReplicaSlots``, and what kernels need not see.

    Every time is on the controller's clock.
    """

    def __init__(self, report: Report, profile: Profile, slots: ReplicaSlots, now_s: float) -> None:
        self.name, self.incarnation, self.profile = report.replica, report.incarnation, profile
        limits, self._correction = limits_of(report), Correction(profile, now_s)
        self.slots, self.slot = slots, slots.take()  # after all that a report of its own kind could make fail
        self.sequence, self._longest_s, self.pid = -1, report.max_iteration_s, report.pid
        self._last_s = 0.0  # of the last iteration that it told
        self.seen_s = self.moved_s = now_s
        self.draining = report.draining
        self.phase = report.phase
        self.kv_used_tokens, self.planner_failures = report.kv_used_tokens, report.planner_failures
        self.counts = report.counts
        fleet_state = slots.fleet_state
        fleet_state.replicas["free_at_s"][self.slot] = now_s
        fleet_state.limits[self.slot] = limits
        slots.profile_coefs[self.slot] = profile.coefficients
        self._predict()
        self.prefixes, self.reported = PrefixIndex(report.kv_capacity_tokens), ReportedRequests()
        self.told_prefixes = ToldPrefixes()
        self.adapters = HeldAdapters()
        self._told_limits: tuple[float, ...] = ()
        self._reserved_s: dict[int, float] = {}  # requests decided for this replica that no report has shown yet

    # -- what changes it --------------------------------------------------------------------------------------------

    def sync(
        self, report: Report, lengths: FleetLengths, tiers: TierTable, calibration: Calibration, now_s: float
    ) -> "Synced":
        """Replace the model's guess by what the replica says; reservations it cannot know of yet stay.

        A report that moves requests which were never told leaves the rows as they are.
        """
        if report.sequence <= self.sequence:
            return Synced()  # overtaken on the way
        self.sequence, self.seen_s, self.draining = report.sequence, now_s, report.draining
        self.moved_s = now_s - report.iteration_age_s  # began its iteration in flight, or is idle
        self._note_standstill(report)
        self.kv_used_tokens, self.planner_failures = report.kv_used_tokens, report.planner_failures
        self.counts = report.counts
        self._limit(report)
        self.limits["kv_reserve"] = lengths.kv_reserve
        if self._correction.follow(report, bool(self.limits["drafts"]), now_s):
            self._predict()
        knows_prefixes = self._follow_prefixes(report)
        rows = self.reported.take(report, lengths, tiers, now_s, self._reserved_s)
        if rows is None:
            return Synced(is_whole=False)
        if any(calibration.margins.values()):
            self._keep_margins(rows, calibration.margins_s(rows, tiers), now_s)
        self.state["free_at_s"] = now_s - min(report.iteration_age_s, LONGEST_S)
        self.state["ahead_s"] = formed_ahead_s(self.limits, self._last_s) if report.iteration_age_s else 0.0
        self.state["formed"], self.state["flight_s"] = 0, 0.0
        ended = [request_uid(request_id) for request_id, _ in report.finished]
        return self._replace_rows(rows, ended, now_s)._replace(is_whole=knows_prefixes)

    def _follow_prefixes(self, report: Report) -> bool:
        """Take what it says of its prefix cache; whether all that it goes on from is known."""
        if report.prefixes is None:
            return True
        gone = self.told_prefixes.take(report.prefixes, report.sequence)
        self.prefixes.forget(gone or ())
        return gone is not None

    def _note_released(self, uids: Sequence[int] | np.ndarray) -> None:
        """These requests give up their KV cache: what is cached of them is evicted last."""
        if self.told_prefixes.is_told and len(uids):
            left = self.table[np.isin(self.table["id"], uids) & has_begun(self.table)]
            rounded = len(left) * int(self.limits["block_tokens"])
            self.told_prefixes.release(int(left["prompt_tokens"].sum() + left["emitted_tokens"].sum()) + rounded)

    def _replace_rows(self, rows: np.ndarray, ended: list[int], now_s: float) -> "Synced":
        """Take reported rows in place of the present ones, with those reserved that neither have ``ended`` nor are
        among them."""
        before = self.table
        came, told = only_in(rows, before), rows
        if self._reserved_s:
            for uid in ended:
                self._reserved_s.pop(uid, None)
            shown = set(self._reserved_s).intersection(rows["id"].tolist())
            self._reserved_s = {
                uid: since_s
                for uid, since_s in self._reserved_s.items()
                if uid not in shown and now_s - since_s <= RESERVED_S
            }
            waiting = [i for i, uid in enumerate(before["id"].tolist()) if uid in self._reserved_s]
            told = stacked(rows, before[waiting]) if waiting else rows
        is_same = not len(came) and len(told) == len(before)  # ids are unique: nothing has gone either
        gone = came if is_same else only_in(before, told)
        self._note_released(gone)
        self.slots.put(self.slot, told)
        return Synced(gone.tolist(), came.tolist())

    def _keep_margins(self, rows: np.ndarray, margins_s: np.ndarray, now_s: float) -> None:
        """Plan what it serves as much earlier than asked as newcomers were, so that those do not use the margin up; by
        half of what is left where that is less, so that no request looks late that is not."""
        left_s = spare_s(EngineModel(self.pessimistic_coefs, self.limits), rows, now_s)
        make_due_earlier(rows, np.minimum(margins_s, 0.5 * left_s))

    def _note_standstill(self, report: Report) -> None:
        """An iteration that takes far longer than those before it: the engine is frozen, or compiles something."""
        told_s = [step.seconds for step in report.steps]
        usual_s, self._last_s = [self._longest_s * LONGEST_FADES, *told_s], (told_s or [self._last_s])[-1]
        self._longest_s = max(usual_s)
        self.is_stuck = report.iteration_age_s > max(STUCK_S, STUCK_TIMES * self._longest_s)

    @property
    def formed_ahead_s(self) -> float:
        """About how long before an iteration begins its engine forms it, going by the longest of late."""
        return float(formed_ahead_s(self.limits, self._longest_s))

    def _limit(self, report: Report) -> None:
        """Follow the engine where it is told to keep to other limits; the slack margin is learnt here."""
        told = _reported_limits(report)
        if told != self._told_limits:
            limits, self._told_limits = limits_of(report), told
            limits["slack_margin"] = self.limits["slack_margin"]
            self.slots.fleet_state.limits[self.slot] = limits

    def _predict(self) -> None:
        """Forecast by the corrected coefficients from now on, and keep the slack margin of the engine's own planner."""
        error, coefficients = self._correction.error, self._correction.coefficients
        self.slots.fleet_state.coefs[self.slot] = coefficients
        self.slots.fleet_state.pessimistic_coefs[self.slot] = coefficients * (1.0 + error)
        self.limits["slack_margin"], self.state["error"] = self._correction.behind, error
        self.is_slowed = self._correction.is_slowed

    def remap_tiers(self, tier_remap: np.ndarray) -> None:
        """Requests have their tiers in another table (``TierTable.tier_remap``); the replica is to tell them anew."""
        self.table["tier"] = tier_remap[self.table["tier"]]
        self.reported.forget()

    def record_reserved(self, uid: int, now_s: float) -> None:
        """A request was added to its rows before the replica has reported it."""
        self._reserved_s[uid] = now_s

    def release(self, uid: int) -> None:
        """Forget a request that ended or went elsewhere."""
        self._note_released([uid])
        self.slots.remove(self.slot, uid)
        self._reserved_s.pop(uid, None)

    # -- what it tells ----------------------------------------------------------------------------------------------

    seen_s = _liveness("seen_s", "When it reported last.")
    moved_s = _liveness("moved_s", "When its iteration in flight began, or it was last idle.")
    suspect_s = _liveness("suspect_s", "When an ingress last saw it fail.")
    is_stuck = _liveness("is_stuck", "Whether its engine stands still.")
    is_slowed = _liveness("is_slowed", "Whether its iterations took far longer than its profile says.")
    draining = _liveness("draining", "Whether it says that it takes nothing new.")

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
        return bool(self.slots.are_live(now_s, silent_s)[self.slot])

    def has(self, uid: int, now_s: float) -> bool:
        """Whether a request of its table was reported by it, or may still be on its way to it."""
        return now_s - self._reserved_s.get(uid, now_s) <= RESERVED_S

    def drift(self) -> dict[str, float]:
        """How far the measured iterations have moved from the profile."""
        return self._correction.drift()

    def iteration_spread(self) -> dict[str, dict[str, Any]]:
        """Quantiles of measured over predicted iteration time by kind of batch, of the latest iterations."""
        return self._correction.spread()

    def check_integrity(self) -> None:
        """Every request once; every reservation a row of the table."""
        ids = self.table["id"].tolist()
        if len(set(ids)) != len(ids):
            raise AssertionError(f"replica {self.name}: a request is in its table twice")
        if (np.diff(np.isinf(self.table["joined_s"]).astype(np.int8)) < 0).any():
            raise AssertionError(f"replica {self.name}: a request that is held is not among the last")
        if not set(self._reserved_s) <= set(ids):
            raise AssertionError(f"replica {self.name}: a reservation without a row")


def limits_of(report: Report) -> np.void:
    """What bounds an engine's iterations (LIMITS[]), as it says."""
    return make_limits(**{name: getattr(report, name) for name in REPORTED_LIMITS})


def admission_row(request: AdmissionRequest, tier: int, lengths: FleetLengths, now_s: float) -> np.ndarray:
    """A new request of value 1 as a planning row (0-d structured array of dtype REQUEST)."""
    slo, row = request.slo, np.zeros((), dtype=REQUEST)
    _fill_slo(row, slo, request.age_s, now_s)
    row["id"], row["tier"], row["value"], row["joined_s"] = request_uid(request.request_id), tier, 1.0, now_s
    row["prompt_tokens"], row["emitted_tokens"] = request.prompt_tokens, request.emitted_tokens
    row["output_cap_tokens"] = request.max_tokens
    row["output_tokens"], row["output_bound_tokens"] = lengths.at_arrival(request)
    if request.transferred_kv_tokens:  # its prompt is computed: it goes on decoding at once
        row["computed_tokens"], row["running"] = request.prompt_tokens + request.emitted_tokens - 1, True
    return row


def _fill_slo(row: np.ndarray, slo: Slo, age_s: float, now_s: float) -> None:
    set_objective(row, now_s - age_s, slo.ttft_s, slo.tpot_s, slo.e2e_s)
    row["best_effort"] = slo.best_effort
    if slo.best_effort:
        to_best_effort(row)
