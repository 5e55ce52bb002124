"""Alarms where what is measured drifts away from what was predicted: TTFT, TPOT and output lengths per tier. Pure.

The median of measured over predicted, over the latest requests, is robust against single stalls. An alarm needs a
clear excess to begin and ends below a smaller one, so that it does not flap. Faster than predicted is no alarm.
"""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from controller.scaling.history import Change, History
from protocol.messages import FINISHED, Outcome, Scope

WINDOW, LEAST = 200, 30  # latest requests that count, and how many an alarm takes
BEGINS, ENDS = 1.5, 1.25  # ratio at which an alarm begins, and below which it ends
CHECK_EVERY = 10  # requests of a tier
# Added to both sides: a few milliseconds, or tokens, more or less are no drift however small the prediction is.
LEAST_FIGURE = {"ttft": 0.05, "tpot": 0.005, "length": 16.0}
TWO_SIDED = ("length",)  # shorter than predicted is as wrong as longer


class Alarm(NamedTuple):
    """An alarm that begins or ends."""

    tier: str
    figure: str
    is_on: bool
    ratio: float
    requests: int


def drift_change(alarm: Alarm, now_s: float) -> Change:
    """The alarm as a line of the fleet's history."""
    before, after = ("as predicted", "drifts") if alarm.is_on else ("drifted", "as predicted")
    reason = f"{alarm.figure} is {alarm.ratio:.2f} times what was predicted, of {alarm.requests} requests"
    return Change(now_s, f"predictions of {alarm.tier}", before, after, reason)


def note_drift(
    watch: "DriftWatch", outcome: Outcome, predicted_tokens: float | None, history: History, now_s: float
) -> bool:
    """Note how a request ended; alarms are history. True where the lengths of a tier begin to drift."""
    alarms = watch.note(outcome, predicted_tokens, now_s)
    for alarm in alarms:
        history.note(drift_change(alarm, now_s))
    return any(alarm.is_on and alarm.figure == "length" for alarm in alarms)


@dataclass
class _Series:
    ratios: deque[float] = field(default_factory=deque)  # the latest ``WINDOW``, of logarithms
    new: int = 0
    since_s: float = math.inf  # when its alarm began; inf: there is none
    _sorted: list[float] = field(default_factory=list)  # the same, ascending

    def append(self, ratio: float) -> None:
        if len(self.ratios) >= WINDOW:
            del self._sorted[bisect_left(self._sorted, self.ratios.popleft())]
        self.ratios.append(ratio)
        insort(self._sorted, ratio)
        self.new += 1

    def median(self) -> float:
        count = len(self._sorted)
        return math.exp(0.5 * (self._sorted[(count - 1) // 2] + self._sorted[count // 2]))


@dataclass
class DriftWatch:
    """Fed with outcomes; tells which alarms begin and end."""

    series: dict[tuple[str, str], _Series] = field(default_factory=dict)

    def note(self, outcome: Outcome, predicted_tokens: float | None, now_s: float) -> list[Alarm]:
        """A request ended; ``predicted_tokens`` is the mean told at its arrival, None where that is not known."""
        if outcome.finish not in FINISHED:
            return []
        tier, found = outcome.tier_asked, list[Alarm | None]()
        if outcome.tests_prediction and outcome.scope != Scope.SEQUENCE:
            found.append(self._add(tier, "ttft", outcome.ttft_s, outcome.predicted_ttft_s, now_s))
            if outcome.output_tokens > 1:
                found.append(self._add(tier, "tpot", outcome.tpot_s, outcome.predicted_tpot_s, now_s))
        if predicted_tokens is not None:
            found.append(self._add(tier, "length", outcome.output_tokens, predicted_tokens, now_s))
        return [alarm for alarm in found if alarm is not None]

    def _add(self, tier: str, figure: str, measured: float, predicted: float, now_s: float) -> Alarm | None:
        if not (0.0 <= measured < math.inf and 0.0 <= predicted < math.inf):
            return None
        if (series := self.series.get((tier, figure))) is None:
            series = self.series[tier, figure] = _Series()
        least = LEAST_FIGURE[figure]
        series.append(math.log((measured + least) / (predicted + least)))
        if series.new < CHECK_EVERY or len(series.ratios) < LEAST:
            return None
        series.new, ratio = 0, series.median()
        excess = max(ratio, 1.0 / ratio) if figure in TWO_SIDED else ratio
        is_on = series.since_s < math.inf
        if is_on == (excess > (ENDS if is_on else BEGINS)):
            return None
        series.since_s = math.inf if is_on else now_s
        return Alarm(tier, figure, not is_on, ratio, len(series.ratios))

    def summary(self, now_s: float, tiers: Collection[str] = ()) -> dict[str, Any]:
        """Per tier and figure the median of measured over predicted; and the alarms there are. Of these tiers, where
        any are named: those of an earlier table get no requests by which an alarm could end."""
        ratios: dict[str, dict[str, float]] = {}
        alarms = []
        for (tier, figure), series in sorted(self.series.items()):
            if tiers and tier not in tiers:
                continue
            ratio = round(series.median(), 3)
            ratios.setdefault(tier, {})[figure] = ratio
            if series.since_s < math.inf:
                since_s = round(now_s - series.since_s, 3)
                alarms.append({"tier": tier, "figure": figure, "ratio": ratio, "since_s": since_s})
        return {"measured_over_predicted": ratios, "alarms": alarms}
