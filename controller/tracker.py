"""Attainment, promises kept, verdicts and prediction errors per tier, over a sliding window and in total."""

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from controller.drift import DriftWatch
from controller.window import SlidingCounts, bin_of
from protocol.messages import Outcome, Scope, Verdict

WINDOW_COUNTS = ("requests", "met", "promised", "kept")
WINDOW_FIGURES = ("ttft_ms", "tpot_ms", "ttft_error_ms", "tpot_error_ms")


@dataclass
class TierCount:
    """Outcomes of one tier; refused and downgraded requests count as misses, those whose client left count not."""

    requests: int = 0
    met: int = 0
    refused: int = 0
    best_effort: int = 0
    errors: int = 0
    abandoned: int = 0
    promised: int = 0
    kept: int = 0

    def add(self, outcome: Outcome) -> None:
        if outcome.finish == "abort":
            self.abandoned += 1
            return
        self.requests += 1
        self.met += outcome.met
        self.promised += outcome.is_promised
        self.kept += outcome.is_promised and outcome.met
        self.refused += outcome.finish == "refused"
        self.errors += outcome.finish == "error"
        self.best_effort += outcome.verdict == Verdict.BEST_EFFORT and outcome.finish != "refused"

    @property
    def attainment(self) -> float | None:
        """Share of requests that got what they asked for; none before the first request."""
        return self.met / self.requests if self.requests else None

    @property
    def kept_share(self) -> float | None:
        """Share of promises that were kept; none before the first promise."""
        return self.kept / self.promised if self.promised else None


@dataclass
class Tracker:
    """Fed with outcomes in order of time; asked for summaries, which are kept up and not computed anew."""

    window_s: float = 60.0
    drift: DriftWatch = field(default_factory=DriftWatch)
    total: dict[str, TierCount] = field(default_factory=lambda: defaultdict(TierCount))
    _recent: SlidingCounts = field(init=False)  # by tier and figure: verdicts, or bins of times

    def __post_init__(self) -> None:
        self._recent = SlidingCounts(self.window_s)

    def note(self, outcome: Outcome, now_s: float) -> None:
        """Count a request; one of several sequences comes once as a whole, and those by themselves do not count."""
        if outcome.scope == Scope.SEQUENCE:
            return
        tier, noted = outcome.tier_asked, list[tuple[tuple[str, str], int]]()
        self.total[tier].add(outcome)
        if outcome.finish != "abort":
            noted.append(((tier, "requests"), 1))
            if outcome.met:
                noted.append(((tier, "met"), 1))
            if outcome.is_promised:
                noted.append(((tier, "promised"), 1))
                if outcome.met:
                    noted.append(((tier, "kept"), 1))
        times_s = [("ttft_ms", outcome.ttft_s)]
        errors_s = [("ttft_error_ms", outcome.ttft_s - outcome.predicted_ttft_s)]
        if outcome.output_tokens > 1:
            times_s.append(("tpot_ms", outcome.tpot_s))
            errors_s.append(("tpot_error_ms", outcome.tpot_s - outcome.predicted_tpot_s))
        if not outcome.has_moved:  # else they are about the death of a replica
            times_s += errors_s
        noted += [((tier, name), bin_of(time_s)) for name, time_s in times_s if math.isfinite(time_s)]
        self._recent.note_all(noted, now_s)

    def summary(self, now_s: float) -> dict[str, dict[str, Any]]:
        """Per tier: totals, and over the window the attainment, latencies and prediction errors (milliseconds)."""
        self._recent.expire(now_s)
        return {name: self._tier(name, count) for name, count in sorted(self.total.items())}

    def _tier(self, name: str, count: TierCount) -> dict[str, Any]:
        window = TierCount(**{what: self._recent.counts[name, what].total() for what in WINDOW_COUNTS})
        return {
            "requests": count.requests,
            "met": count.met,
            "refused": count.refused,
            "best_effort": count.best_effort,
            "errors": count.errors,
            "abandoned": count.abandoned,
            "attainment": count.attainment,
            "promised": count.promised,
            "kept": count.kept,
            "kept_share": count.kept_share,
            "window": {
                "requests": window.requests,
                "attainment": window.attainment,
                "kept_share": window.kept_share,
                **{figure: self._recent.quantiles_ms((name, figure)) for figure in WINDOW_FIGURES},
            },
        }
