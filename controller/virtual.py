"""The controller's mirror of one replica: its requests as a planning table, advanced by the model between reports."""

from collections.abc import Iterable

import msgspec
import numpy as np

from controller.lengths import LengthEstimator
from controller.wire import Admission, Progress, Report, Slo, Step, request_uid
from planning.limits import LIVE_FILLER, make_limits
from planning.rollout import advance
from planning.tables import REQUEST, request_table
from profiles.online import corrected, drift, new_correction, observe_steps
from profiles.profile import Profile
from routing.policy import Candidate

MOST_CAUTION = 0.5  # a model that errs by more has other problems than a margin could solve
RESERVED_S = 3.0  # a reservation that no report confirms by then was lost on its way


class VirtualReplica:
    """State of one replica as far as it is known; every time is on the controller's clock."""

    def __init__(self, report: Report, profile: Profile, now_s: float) -> None:
        self.name, self.birth, self.profile = report.replica, report.birth, profile
        self.coefficients = np.array(profile.coefficients)
        self.cautious = self.coefficients  # what promises are made with: the model's own measured error on top
        self._correction = new_correction(self.coefficients)
        self.sequence, self.seen_s, self.free_at_s = -1, now_s, now_s
        self.draining, self.suspect_s, self.pid = report.draining, -np.inf, report.pid
        self.kv_used_tokens = report.kv_used_tokens
        self.limits = make_limits(
            kv_capacity_tokens=report.kv_capacity_tokens,
            max_running=report.max_running,
            max_batch_tokens=report.max_batch_tokens,
            filler=LIVE_FILLER,
        )
        self.table: np.ndarray = request_table(0)
        self._reserved_s: dict[int, float] = {}  # requests decided for this replica that no report has shown yet

    # -- what changes it --------------------------------------------------------------------------------------------

    def sync(self, report: Report, lengths: LengthEstimator, now_s: float) -> None:
        """Replace the model's guess by what the replica says; reservations it cannot know of yet stay."""
        if report.sequence <= self.sequence:
            return  # overtaken on the way
        self.sequence, self.seen_s, self.draining = report.sequence, now_s, report.draining
        self.kv_used_tokens = report.kv_used_tokens
        self._correct(report.steps)
        rows = progress_rows(report.requests, lengths, now_s)
        ended = [request_uid(request_id) for request_id, _ in report.finished]
        for uid in (*rows["id"].tolist(), *ended):
            self._reserved_s.pop(uid, None)
        expired = [uid for uid, since_s in self._reserved_s.items() if now_s - since_s > RESERVED_S]
        for uid in expired:
            del self._reserved_s[uid]
        waiting = self.table[np.isin(self.table["id"], list(self._reserved_s))]
        self.table = np.concatenate([rows, waiting])
        self.free_at_s = now_s - report.iteration_age_s

    def _correct(self, steps: Iterable[Step]) -> None:
        """Move the coefficients by measured iterations (slope and intercept apart)."""
        measured = np.array([msgspec.structs.astuple(step) for step in steps], dtype=np.float64)
        if len(measured):
            self._correction = observe_steps(self._correction, self.profile.coefficients, measured)
            self.coefficients = corrected(self.profile.coefficients, self._correction)
            error = drift(self._correction, self.profile.coefficients).error
            self.cautious = self.coefficients * (1.0 + min(error, MOST_CAUTION))

    def advance(self, now_s: float) -> None:
        """Run the iterations that the model says the engine has finished by now."""
        if len(self.table):
            self.free_at_s = advance(self.coefficients, self.table, self.free_at_s, now_s, self.limits)
        else:
            self.free_at_s = now_s

    def reserve(self, row: np.ndarray, now_s: float) -> None:
        """Add an admitted request before the replica has reported it."""
        self.table = np.concatenate([self.table, np.atleast_1d(row)])
        self._reserved_s[int(row["id"])] = now_s

    def release(self, uid: int) -> bool:
        """Forget a request that ended; whether it was here."""
        keep = self.table["id"] != uid
        self.table = self.table[keep]
        self._reserved_s.pop(uid, None)
        return not bool(keep.all())

    # -- what it tells ----------------------------------------------------------------------------------------------

    def is_live(self, now_s: float, silent_s: float) -> bool:
        """Whether it reported within ``silent_s`` and no door has seen it fail since its last birth."""
        return now_s - self.seen_s <= silent_s and now_s - self.suspect_s > silent_s

    def drift(self) -> dict[str, float]:
        """How far the measured iterations have moved from the profile."""
        return {k: float(v) for k, v in drift(self._correction, self.profile.coefficients)._asdict().items()}

    def kv_peak_tokens(self) -> float:
        """KV tokens of all its requests at their predicted ends: an upper bound of what they hold at one time."""
        table = self.table
        return float(np.sum(table["prompt_tokens"], dtype=np.int64) + np.sum(table["output_tokens"], dtype=np.int64))

    def candidate(self, index: int, tier: int) -> Candidate:
        """What routing sees of it."""
        table = self.table
        left = table["prompt_tokens"] + table["emitted_tokens"] - table["computed_tokens"]
        return Candidate(
            index=index,
            tier=tier,
            requests=len(table),
            best_effort=int(table["best_effort"].sum()),
            kv_free_tokens=float(self.limits["kv_capacity_tokens"]) - self.kv_peak_tokens(),
            backlog_tokens=float(np.maximum(left - 1, 0).sum()),
        )

    def check_integrity(self) -> None:
        """Every request once; every reservation a row of the table."""
        ids = self.table["id"].tolist()
        if len(set(ids)) != len(ids):
            raise AssertionError(f"replica {self.name}: a request is in its table twice")
        if not set(self._reserved_s) <= set(ids):
            raise AssertionError(f"replica {self.name}: a reservation without a row")


def admission_row(ask: Admission, tier: int, lengths: LengthEstimator, now_s: float) -> np.ndarray:
    """A new request as a planning row (0-d structured array of dtype REQUEST)."""
    slo, row = ask.slo, np.zeros((), dtype=REQUEST)
    _fill_slo(row, slo, ask.age_s, now_s)
    row["id"], row["tier"] = request_uid(ask.request_id), tier
    row["prompt_tokens"], row["emitted_tokens"] = ask.prompt_tokens, ask.emitted_tokens
    row["output_cap_tokens"] = ask.max_tokens
    row["output_tokens"] = lengths.predict(slo.tier, ask.emitted_tokens, ask.max_tokens)
    row["value"] = 1.0
    return row


def progress_rows(requests: Iterable[Progress], lengths: LengthEstimator, now_s: float) -> np.ndarray:
    """Reported requests as a planning table."""
    requests = list(requests)
    table = request_table(len(requests))
    for row, seen in zip(table, requests, strict=True):
        _fill_slo(row, seen.slo, seen.age_s, now_s)
        row["id"], row["running"] = request_uid(seen.request_id), seen.running
        row["prompt_tokens"], row["computed_tokens"] = seen.prompt_tokens, seen.computed_tokens
        row["emitted_tokens"], row["output_cap_tokens"] = seen.emitted_tokens, seen.output_cap_tokens
        predicted = lengths.predict(seen.slo.tier, seen.emitted_tokens, seen.output_cap_tokens)
        row["output_tokens"] = max(predicted, min(seen.output_tokens, seen.output_cap_tokens))
    return table


def _fill_slo(row: np.ndarray, slo: Slo, age_s: float, now_s: float) -> None:
    row["arrival_s"] = now_s - age_s
    row["best_effort"] = slo.best_effort
    if not slo.best_effort:
        row["ttft_s"], row["tpot_s"] = slo.ttft_s, slo.tpot_s
        row["deadline_s"] = now_s - age_s + slo.e2e_s
    else:
        row["ttft_s"] = row["tpot_s"] = row["deadline_s"] = np.inf
