"""How one replica's profile is corrected: by the iterations that it tells of, and back while there are none."""

from typing import Any

import msgspec
import numpy as np

from profiles.draft_cost import DraftCost
from profiles.kernels import K_SPEC, gemm_s
from profiles.online import LEAST_INTERCEPT_S, corrected, drift, follow_steps, learn_usual, new_correction, relaxed
from profiles.online_state import ERROR, INTERCEPT_S, RELAXING, RESIDUALS, SLOPE
from profiles.profile import Profile
from profiles.reach import reach
from profiles.residuals import told_quantiles
from protocol.messages import Report

MOST_CAUTION = 0.5  # a model that errs by more has other problems than a margin could solve
RELAX_S = 1.0  # of idleness, after which the correction begins to relax
SLOWED = 2.0  # times what the profile says: more is no small difference of hardware, and may pass
USUAL_PRIOR = 100  # iterations that the profile counts as, before many were seen: a start is a busy time
USUAL_ITERATIONS = 1000  # memory of the running mean that is usual: hardware differs in all of them, a stall is in few
USUAL_HALF_LIFE_S = 1800.0  # of that, too, while the replica is idle
MOST_USUAL = np.array([SLOWED, SLOWED, 0.25, 0.25, 2.0, 0.1])  # the second times the profile's intercept


class Correction:
    """Coefficients, and how far they err, as of the last report."""

    def __init__(self, profile: Profile, now_s: float) -> None:
        self.coefficients = np.array(profile.coefficients)
        self._profile, self._state = profile, new_correction(self.coefficients, profile.spread)
        self._draft_cost, self._busy_s, self._seen = DraftCost(), now_s, USUAL_PRIOR
        self._unit_s = max(float(gemm_s(self.coefficients, 0.0)), LEAST_INTERCEPT_S)
        self._fresh, self._behind = self._state[list(RELAXING)], float(reach(self._state))
        self._usual, self._most = self._fresh.copy(), MOST_USUAL * [1.0, self._unit_s, 1.0, 1.0, 1.0, 1.0]

    @property
    def error(self) -> float:
        """Mean absolute error over the measured time, at most ``MOST_CAUTION``."""
        return min(float(self._state[ERROR]), MOST_CAUTION)

    @property
    def behind(self) -> float:
        """Iterations that a run of them falls behind at most (``profiles.online.reach``)."""
        return self._behind

    @property
    def is_slowed(self) -> bool:
        """Whether iterations took far longer than the profile says, or nobody could tell how long."""
        slope, intercept = self._state[SLOPE], self._state[INTERCEPT_S] / self._unit_s
        return bool(max(slope, intercept) > SLOWED or self.error >= MOST_CAUTION)

    def follow(self, report: Report, has_drafts: bool, now_s: float) -> bool:
        """Move the coefficients by measured iterations (slope and intercept apart), or, while the replica is idle, back
        to the usual ones where those are better; whether they have moved."""
        coef, idle_s = self._profile.coefficients, now_s - self._busy_s
        if is_busy := bool(report.steps or report.iteration_age_s):
            self._busy_s = now_s
        if report.steps:
            measured = np.array(list(map(msgspec.structs.astuple, report.steps)), dtype=np.float64)
            if has_drafts:
                measured = self._draft_cost.without(self.coefficients, measured)
            self._state, self.coefficients, self._behind = follow_steps(self._state, coef, measured)
            self._seen = min(self._seen + len(measured), USUAL_ITERATIONS)
            learn_usual(self._usual, self._state, self._most, min(1.0, len(measured) / self._seen))
        elif not is_busy and idle_s >= RELAX_S:
            self._usual += (1.0 - 0.5 ** (idle_s / USUAL_HALF_LIFE_S)) * (self._fresh - self._usual)
            self._state, self._busy_s = relaxed(self._state, coef, self._usual, idle_s), now_s
            self.coefficients, self._behind = corrected(coef, self._state), float(reach(self._state))
        else:
            return False
        self.coefficients[K_SPEC] += self._draft_cost.draft_s
        return True

    def drift(self) -> dict[str, float]:
        """How far the measured iterations have moved from the profile."""
        return {k: float(v) for k, v in drift(self._state, self._profile.coefficients)._asdict().items()}

    def spread(self) -> dict[str, dict[str, Any]]:
        """Quantiles of measured over predicted iteration time by kind of batch, of the latest iterations."""
        return told_quantiles(self._state[RESIDUALS:])
