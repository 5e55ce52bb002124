"""How sure a promise must be, and how much earlier than asked requests are planned, so that promises are kept as often
as their tiers say. Pure.

Iterations stray, and a forecast knows by how much: it gives the chance that a first token comes in time
(``planning.forecast.chance``). A promise asks for a least one. A broken promise raises what its tier asks for, a kept
one lowers it, in the proportion that leaves it where it is at the tier's ``confidence`` (quantile tracking, the
proportional part of Angelopoulos et al. 2023, "Conformal PID control"). Never is more asked for than that confidence:
if the chances are right, as many are kept then.

Whatever a forecast leaves out (the way through the ingress, cores that others use, outputs longer than predicted) makes
promises late more often than that. The margin of a tier, a part of the time that an objective allows, tracks it in the
same way, and requests are planned earlier by it. A promise that was known to be doubtful counts as that. In the long
run as much is kept as is asked for whatever the errors look like, as long as both stay within their bounds. A tier
whose requests have asked in vain for long forgets its margin: what made promises late may have passed.

A request whose output is long ends long after its first token, and most broken promises break there. So an ingress
tells of the first token when it has come, or is missing; what comes later only corrects that.
"""

from dataclasses import dataclass, field

import numpy as np

from controller.scaling.tiers import TierTable
from planning.deadlines import make_due_earlier
from protocol.messages import Outcome, Scope, Verdict

RATE = 0.05  # of the time that an objective allows, per broken promise
MOST = 0.5  # of that time
AIM = 0.8  # times as many promises as a tier allows to break are to: what is kept of some hundred varies by as much
FADE = 2e-4  # of a chance, per request: a tier that is promised nothing would never learn that it may be
QUIET_S, HALF_LIFE_S = 60.0, 300.0  # while requests ask and none is promised, a margin stays so long, and then halves
FIRST_CHANCE, CHANCE_RATE = 0.5, 0.1  # that are asked for at first, and more of it per broken promise


@dataclass
class Calibration:
    """By tiers' names: the margin, a part of the TTFT asked for or, without one, of the deadline; and the least chance
    that a promise asks for."""

    margins: dict[str, float] = field(default_factory=dict)
    chances: dict[str, float] = field(default_factory=dict)
    _asked_s: dict[str, float] = field(default_factory=dict)  # since when requests have asked in vain, or not been told

    def note(self, outcome: Outcome, tiers: TierTable) -> None:
        """A request has ended, or its first token is told; one of several sequences counts once, as a whole. Nothing
        helps where one moved."""
        if outcome.verdict == Verdict.ADMITTED:
            self._asked_s.pop(outcome.tier_asked, None)
        if not outcome.tests_prediction or (outcome.scope == Scope.SEQUENCE and not outcome.is_first_token):
            return
        if (position := tiers.find(outcome.tier_asked)) is None:
            return
        tier, told = tiers.tiers[position], outcome.first_token_met
        doubt = AIM * (1.0 - tier.confidence)
        broken, expected, most = not outcome.met, doubt, max(doubt, 1.0 - outcome.chance)
        if outcome.is_first_token:
            broken = not told
        elif told is not None:  # it has counted already
            broken, expected, most = told and not outcome.met, 0.0, 0.0
        chance = self.chances.get(tier.name, FIRST_CHANCE) + CHANCE_RATE * (broken - expected)
        self.chances[tier.name] = min(max(chance, 0.0), tier.confidence)
        margin = self.margins.get(tier.name, 0.0) + RATE * (broken - most)
        self.margins[tier.name] = min(max(margin, 0.0), MOST)

    def least_chance(self, tier: int, tiers: TierTable) -> float:
        """What a promise asks for, of the tier at this position; -1: of none."""
        if tier < 0:
            return 0.0
        return min(self.chances.get(tiers.tiers[tier].name, FIRST_CHANCE), tiers.tiers[tier].confidence)

    def _ask(self, tier: int, tiers: TierTable, fades: bool) -> float:
        """The same, as one more request asks for it: it fades."""
        asked = self.least_chance(tier, tiers)
        if fades and asked > FIRST_CHANCE:
            self.chances[tiers.tiers[tier].name] = max(FIRST_CHANCE, asked - FADE)
        return asked

    def _fade_margin(self, tier: str, now_s: float) -> None:
        """Where a margin leaves too little time for any replica, no promise is left by which it could be lowered."""
        quiet_s = now_s - QUIET_S - self._asked_s.setdefault(tier, now_s)
        if quiet_s > 0.0 and tier in self.margins:
            self.margins[tier] *= 0.5 ** (quiet_s / HALF_LIFE_S)
            self._asked_s[tier] += quiet_s

    def plan_early(self, row: np.ndarray, tiers: TierTable, is_first: bool, now_s: float) -> float:
        """Let a request (REQUEST[], in place) ask for its tier's least chance, and be due earlier than asked by its
        margin; returns that, 0 for best effort. ``is_first``: it asks for the first time."""
        row["least_chance"] = 0.0 if row["best_effort"] else self._ask(int(row["tier"]), tiers, is_first)
        if row["best_effort"] or not (0 <= row["tier"] < len(tiers.tiers)) or not any(self.margins.values()):
            return 0.0
        self._fade_margin(tiers.tiers[int(row["tier"])].name, now_s)
        margin_s = float(self.margins_s(row[None], tiers)[0])
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
