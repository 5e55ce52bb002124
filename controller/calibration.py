"""How much earlier than asked requests are planned, so that promises are kept as often as their tiers say. Pure.

Whatever the model of an engine leaves out (the way through the ingress, cores that others use, outputs longer than
predicted) makes promises late. The margin of a tier tracks it: a broken promise raises it, a kept one lowers it, in the
proportion that leaves it where it is at the tier's ``confidence`` (quantile tracking, the proportional part of
Angelopoulos et al. 2023, "Conformal PID control"): in the long run that share is kept whatever the errors look like, as
long as the margin stays within its bounds. No promise moves it by more than ``RATE``.
"""

from dataclasses import dataclass, field

import numpy as np

from controller.scaling.tiers import TierTable
from planning.deadlines import make_due_earlier
from protocol.messages import Outcome, Scope

RATE = 0.05  # of the time that an objective allows, per broken promise
LEAST, MOST = 0.0, 0.5  # of that time


@dataclass
class Calibration:
    """The margin of each tier by name: a part of the TTFT asked for or, without one, of the deadline."""

    margins: dict[str, float] = field(default_factory=dict)

    def note(self, outcome: Outcome, tiers: TierTable) -> None:
        """A request has ended; one of several sequences counts once, as a whole. No margin helps where one moved."""
        if outcome.scope == Scope.SEQUENCE or not outcome.tests_prediction:
            return
        if (position := tiers.find(outcome.tier_asked)) is not None:
            tier = tiers.tiers[position]
            moved = self.margins.get(tier.name, 0.0) + RATE * ((not outcome.met) - (1.0 - tier.confidence))
            self.margins[tier.name] = min(max(moved, LEAST), MOST)

    def plan_early(self, row: np.ndarray, tiers: TierTable) -> float:
        """Let a request (REQUEST[], in place) be due earlier than asked by its tier's margin; returns that, 0 for best
        effort."""
        margin_s = float(self.margins_s(row[None], tiers)[0]) if any(self.margins.values()) else 0.0
        if margin_s:
            make_due_earlier(row, margin_s)
        return margin_s

    def margins_s(self, rows: np.ndarray, tiers: TierTable) -> np.ndarray:
        """By how much requests (REQUEST[n]) are to be planned earlier than asked, f8[n]; best effort by nothing."""
        if not any(self.margins.values()):
            return np.zeros(len(rows))
        shares = np.array([*(self.margins.get(tier.name, 0.0) for tier in tiers.tiers), 0.0])  # the last: of no tier
        with np.errstate(invalid="ignore"):  # inf - inf, inf * 0: best effort
            allowed_s = np.where(np.isfinite(rows["ttft_s"]), rows["ttft_s"], rows["deadline_s"] - rows["arrival_s"])
            by_s: np.ndarray = np.where(np.isfinite(allowed_s), shares[rows["tier"]] * allowed_s, 0.0)
        return by_s
