"""Length estimators that answer from statistics alone, each by name. Pure."""

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import NormalDist

import numpy as np

from controller.lengths.estimate import ORACLE, LengthEstimate, LengthEstimator, LengthQuery, ahead
from controller.lengths.fair_window import FairWindow
from controller.mirror.lengths import TierLengths
from profiles.suggest import suggest

UNCALIBRATED = ("none", ORACLE)  # their bounds hold as they are
LASTING = (*UNCALIBRATED, "gaussian")  # what they say does not fade
COLD_FACTOR = 4.0  # bound over prior before finished requests have told; the cap bounds it anyhow
TASK_WINDOW = 200  # finished requests of a task, or ratios of a client, that count
MOST_TASKS = 1024
REFRESH = 8  # observations after which their statistics are computed anew
LEAST = 10  # of them, before which they tell nothing
MOST_RATIO = 3.0  # of the logarithm of a length over its hint, either way


@dataclass
class TierMean:
    """PolyServe's mean per tier, as the product-limit estimate of ``controller.mirror.lengths``, and its quantile."""

    tiers: TierLengths
    name: str = "tier_mean"

    def estimate(self, query: LengthQuery, emitted_tokens: int, coverage: float) -> LengthEstimate:
        mean, bound = self.tiers.estimate(query.tier, emitted_tokens, query.cap_tokens, query.tenant, coverage)
        if bound == math.inf:
            prior = self.tiers.prior(query.tier)
            bound = max(COLD_FACTOR * prior, 2.0 * emitted_tokens)
        return LengthEstimate(mean, max(mean, bound))

    def learn(self, query: LengthQuery, output_tokens: int, is_cut: bool) -> None:
        self.tiers.note(query.tier, output_tokens, max(query.cap_tokens, output_tokens), is_cut, query.tenant)


class Sample:
    """The latest observations of a task or a client; their statistics are computed anew now and then."""

    def __init__(self) -> None:
        self.window: FairWindow[float] = FairWindow(TASK_WINDOW)
        self._statistics, self._new = (0.0, 0.0, 0.0), REFRESH

    def append(self, tenant: str, value: float) -> None:
        self.window.append(tenant, value)
        self._new += 1

    def statistics(self, coverage: float) -> tuple[float, float, float]:
        """Mean, standard deviation and the quantile ``coverage``."""
        if self._new >= REFRESH:
            seen = np.fromiter(self.window, dtype=np.float64)
            self._statistics = float(seen.mean()), float(seen.std()), float(np.quantile(seen, coverage))
            self._new = 0
        return self._statistics


@dataclass
class GaussianPerTask:
    """Mean and standard deviation per task (section 4 of the simulated-annealing paper): an application, or a tier."""

    base: TierMean
    name: str = "gaussian"
    _tasks: OrderedDict[str, Sample] = field(default_factory=OrderedDict)

    def estimate(self, query: LengthQuery, emitted_tokens: int, coverage: float) -> LengthEstimate:
        task = self._tasks.get(_task(query))
        if task is None or len(task.window) < LEAST:
            return self.base.estimate(query, emitted_tokens, coverage)
        mean, deviation, _quantile = task.statistics(coverage)
        longer = ahead(mean, emitted_tokens)
        bound = longer + max(0.0, NormalDist().inv_cdf(coverage)) * deviation
        return LengthEstimate(longer, max(bound, longer))

    def learn(self, query: LengthQuery, output_tokens: int, is_cut: bool) -> None:
        self.base.learn(query, output_tokens, is_cut)
        task = _task(query)
        self._tasks.setdefault(task, Sample()).append(query.tenant, output_tokens)
        self._tasks.move_to_end(task)
        if len(self._tasks) > MOST_TASKS:
            self._tasks.popitem(last=False)


def _task(query: LengthQuery) -> str:
    return f"app {query.traits.app}" if query.traits.app else f"tier {query.tier}"


@dataclass
class ClientHint:
    """What clients say, times how their own earlier hints turned out; without a hint as ``tier_mean``."""

    base: TierMean
    name: str = "client_hint"
    _ratios: OrderedDict[str, Sample] = field(default_factory=OrderedDict)

    def estimate(self, query: LengthQuery, emitted_tokens: int, coverage: float) -> LengthEstimate:
        hint = min(query.traits.output_hint_tokens, query.cap_tokens)
        if hint <= 0:
            return self.base.estimate(query, emitted_tokens, coverage)
        ratios = self._ratios.get(query.tenant)
        if ratios is None or len(ratios.window) < LEAST:
            longer = ahead(hint, emitted_tokens)
            return LengthEstimate(longer, 2.0 * longer)
        mean, deviation, quantile = ratios.statistics(coverage)
        longer = ahead(hint * math.exp(mean + 0.5 * deviation * deviation), emitted_tokens)  # as if log-normal
        bound = hint * math.exp(quantile)
        return LengthEstimate(longer, max(bound, longer))

    def learn(self, query: LengthQuery, output_tokens: int, is_cut: bool) -> None:
        self.base.learn(query, output_tokens, is_cut)
        hint = min(query.traits.output_hint_tokens, query.cap_tokens)
        if hint <= 0:
            return
        ratio = min(max(math.log(max(1, output_tokens) / hint), -MOST_RATIO), MOST_RATIO)
        self._ratios.setdefault(query.tenant, Sample()).append("", ratio)
        self._ratios.move_to_end(query.tenant)
        if len(self._ratios) > MOST_TASKS:
            self._ratios.popitem(last=False)


@dataclass
class NoEstimate:
    """Every output is as long as its cap allows."""

    name: str = "none"

    def estimate(self, query: LengthQuery, emitted_tokens: int, coverage: float) -> LengthEstimate:
        return LengthEstimate(query.cap_tokens, query.cap_tokens)

    def learn(self, query: LengthQuery, output_tokens: int, is_cut: bool) -> None:
        pass


@dataclass
class Oracle:
    """The truth, which the simulator tells as the client's hint. Never selectable in a configuration."""

    name: str = ORACLE

    def estimate(self, query: LengthQuery, emitted_tokens: int, coverage: float) -> LengthEstimate:
        length = max(query.traits.output_hint_tokens, emitted_tokens + 1)
        return LengthEstimate(length, length)

    def learn(self, query: LengthQuery, output_tokens: int, is_cut: bool) -> None:
        pass


ESTIMATORS: Mapping[str, Callable[[TierMean], LengthEstimator]] = {  # by name; each may fall back on the means of tiers
    "tier_mean": lambda base: base,
    "forest": lambda base: base,
    "gaussian": GaussianPerTask,
    "client_hint": ClientHint,
    "none": lambda _: NoEstimate(),
    ORACLE: lambda _: Oracle(),
}


def make_estimator(name: str, tiers: TierLengths) -> LengthEstimator:
    """The estimator called ``name``, which may fall back on the means of ``tiers``; raises ``ValueError``.

    ``forest`` answers here as ``tier_mean`` does: forests are asked in batches (``controller.lengths.fleet_lengths``).
    """
    if name not in ESTIMATORS:
        raise ValueError(f"lengths.estimator: no estimator {name!r}; {suggest(name, list(ESTIMATORS))}")
    return ESTIMATORS[name](TierMean(tiers))
