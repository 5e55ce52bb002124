"""Attainment, promises kept, verdicts and prediction errors per tier, over a sliding window and in total."""

import math
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from protocol.messages import Outcome, Scope, Verdict


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
    """Fed with outcomes in order of time; asked for summaries."""

    window_s: float = 60.0
    total: dict[str, TierCount] = field(default_factory=lambda: defaultdict(TierCount))
    _recent: deque[tuple[float, Outcome]] = field(default_factory=deque)

    def note(self, outcome: Outcome, now_s: float) -> None:
        """Count a request; one of several sequences comes once as a whole, and those by themselves do not count."""
        if outcome.scope == Scope.SEQUENCE:
            return
        self.total[outcome.tier_asked].add(outcome)
        self._recent.append((now_s, outcome))
        self._expire(now_s)

    def _expire(self, now_s: float) -> None:
        while self._recent and self._recent[0][0] < now_s - self.window_s:
            self._recent.popleft()

    def summary(self, now_s: float) -> dict[str, dict[str, Any]]:
        """Per tier: totals, and over the window the attainment, latencies and prediction errors (milliseconds)."""
        self._expire(now_s)
        recent: dict[str, list[Outcome]] = defaultdict(list)
        for _, outcome in self._recent:
            recent[outcome.tier_asked].append(outcome)
        return {name: self._tier(count, recent[name]) for name, count in sorted(self.total.items())}

    def _tier(self, count: TierCount, recent: list[Outcome]) -> dict[str, Any]:
        window = TierCount()
        for outcome in recent:
            window.add(outcome)
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
                "ttft_ms": percentiles_ms([o.ttft_s for o in recent]),
                "tpot_ms": percentiles_ms([o.tpot_s for o in recent if o.output_tokens > 1]),
                "ttft_error_ms": percentiles_ms([o.ttft_s - o.predicted_ttft_s for o in recent]),
                "tpot_error_ms": percentiles_ms([o.tpot_s - o.predicted_tpot_s for o in recent if o.output_tokens > 1]),
            },
        }


def percentiles_ms(seconds: list[float]) -> dict[str, float] | None:
    """P50, P95 and P99 in milliseconds of the finite values; none when there is no value."""
    finite = [value * 1000.0 for value in seconds if math.isfinite(value)]
    if not finite:
        return None
    return {f"p{q}": round(float(np.percentile(finite, q)), 3) for q in (50, 95, 99)}
