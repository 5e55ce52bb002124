"""How one replica's profile is corrected: by the iterations that it tells of, and back while there are none."""

from typing import Any

import msgspec
import numpy as np

from profiles.draft_cost import DraftCost
from profiles.kernels import K_SPEC
from profiles.online import ERROR, RESIDUALS, SLOPE, corrected, drift, follow_steps, new_correction, reach, relaxed
from profiles.profile import Profile
from profiles.residuals import told_quantiles
from protocol.messages import Report

RELAX_S = 1.0  # of idleness, after which the correction begins to relax
SLOWED = 2.0  # times what the profile says: more is no small difference of hardware, and may pass


class Correction:
    """Coefficients, and how far they err, as of the last report."""

    def __init__(self, profile: Profile, now_s: float) -> None:
        self.coefficients = np.array(profile.coefficients)
        self._profile, self._state = profile, new_correction(self.coefficients, profile.spread)
        self._draft_cost, self._busy_s = DraftCost(), now_s

    @property
    def error(self) -> float:
        """Mean absolute error over the measured time."""
        return float(self._state[ERROR])

    @property
    def behind(self) -> float:
        """Iterations that a run of them falls behind at most (``profiles.online.reach``)."""
        return float(reach(self._state))

    @property
    def is_slowed(self) -> bool:
        """Whether iterations took far longer than the profile says."""
        return bool(self._state[SLOPE] > SLOWED)

    def follow(self, report: Report, has_drafts: bool, now_s: float) -> bool:
        """Move the coefficients by measured iterations (slope and intercept apart), or, while the replica is idle, back
        to the profile; whether they have moved."""
        coef, idle_s = self._profile.coefficients, now_s - self._busy_s
        if is_busy := bool(report.steps or report.iteration_age_s):
            self._busy_s = now_s
        if report.steps:
            measured = np.array(list(map(msgspec.structs.astuple, report.steps)), dtype=np.float64)
            if has_drafts:
                measured = self._draft_cost.without(self.coefficients, measured)
            self._state, self.coefficients, _behind = follow_steps(self._state, coef, measured)
        elif not is_busy and idle_s >= RELAX_S:
            self._state, self._busy_s = relaxed(self._state, coef, idle_s), now_s
            self.coefficients = corrected(coef, self._state)
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
