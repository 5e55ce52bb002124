"""How long an output will be: priors from the configuration, moved by what finished requests turned out to be. Pure.

A request that ended at its cap tells only that it would have been at least that long. So lengths come from the
product-limit estimate of Kaplan and Meier (1958), which takes such observations for what they are.

Nobody moves the estimate of others far. Requests with caps of another magnitude are counted apart, a tenant's own
requests are predicted by its own history, and of each tenant only the latest few count for everybody else.
"""

import math
from bisect import bisect_left, bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import numpy as np
from numba import njit

from controller.lengths.estimate import ahead
from protocol.messages import FINISHED, Outcome

WINDOW = 200  # latest requests of a tenant that count; after so many the prior is forgotten
PRIOR_WEIGHT = 100.0  # requests that a prior counts for, before any has finished
SHARED_OF_TENANT = 20  # latest requests of a named tenant that count for all the others
MOST_TENANTS = 64  # named ones that are remembered per tier and magnitude of caps
TRUSTED_SHARE = 0.025  # of the sample must have reached a length for what is longer to be read from the sample
CAP_BITS = 4  # caps are of one magnitude within a factor of two to this power
LEAST_BOUND = 30  # observations before which they tell no upper bound
HALF_LIFE_S = 60.0  # of what is known, while nobody is served by it
LONGEST_S = 60.0  # that nobody has been, before it is forgotten; and that counts between two who are not
REFRESH = 16  # a curve is drawn anew when its sample grew by this part

ANYBODY, EVERYBODY = "", "*"  # whoever is not known by a tenant's name; and all together

Observation = tuple[int, bool]  # output tokens, and whether they ended at the cap


@dataclass(frozen=True, slots=True)
class Curve:
    """Expected output under a cap: ``areas_tokens`` under the survival curve up to each of ``lengths_tokens``."""

    lengths_tokens: tuple[float, ...]
    areas_tokens: tuple[float, ...]
    shares: tuple[float, ...]  # of requests that are longer than each of the lengths

    def mean_tokens(self, cap_tokens: float) -> float:
        """Mean output of requests with this cap. Beyond what the sample tells, half of that is still ahead."""
        at = bisect_right(self.lengths_tokens, cap_tokens) - 1
        longest_tokens = self.lengths_tokens[at]
        left_tokens = cap_tokens - longest_tokens
        if at == len(self.lengths_tokens) - 1:
            left_tokens = min(left_tokens, longest_tokens / 2)
        return self.areas_tokens[at] + self.shares[at] * left_tokens

    def quantile_tokens(self, coverage: float, emitted_tokens: int = 0) -> float:
        """Length that a share ``coverage`` of those stays within that got beyond ``emitted_tokens``; inf: not known."""
        after = bisect_right(self.lengths_tokens, emitted_tokens)
        most = self.shares[after - 1] * (1.0 - coverage)
        at = max(after, bisect_left(self.shares, -most, key=lambda share: -share))
        return self.lengths_tokens[at] if at < len(self.lengths_tokens) else math.inf


class Drawn(NamedTuple):
    """A curve, the configured prior at that time, and of how many observations it is."""

    curve: Curve
    prior_tokens: float
    size: int


def draw_curve(sample: Iterable[Observation], prior_tokens: float) -> Curve:
    """The product-limit estimate, beside a prior that says ``prior_tokens`` for certain.

    At every length the prior fades by the observations that were not cut before: short caps tell nothing about long
    outputs.
    """
    observed = [*sample]
    tokens = np.array([each for each, _is_cut in observed] + [prior_tokens], dtype=np.float64)
    is_cut = np.array([cut for _tokens, cut in observed] + [False], dtype=np.bool_)
    is_prior = np.zeros(len(tokens), dtype=np.bool_)
    is_prior[-1] = True
    order = np.lexsort((is_prior, is_cut, tokens))
    points = _points(tokens[order], is_cut[order], is_prior[order], prior_tokens)
    return Curve(*(tuple(column.tolist()) for column in points))


@njit(cache=True)
def _points(
    tokens: np.ndarray, is_cut: np.ndarray, is_prior: np.ndarray, prior_tokens: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lengths, areas and shares of ``Curve``: of observations in order (f8[n], bool[n]), of which one is the prior."""
    reached = uncut = len(tokens) - 1
    least, last = TRUSTED_SHARE * max(float(reached), PRIOR_WEIGHT), 0
    lengths, areas, shares = np.zeros(len(tokens) + 1), np.zeros(len(tokens) + 1), np.ones(len(tokens) + 1)
    for i in range(len(tokens)):
        prior = PRIOR_WEIGHT * max(0.0, 1.0 - uncut / WINDOW) if tokens[i] <= prior_tokens else 0.0
        weight = reached + prior
        if shares[last] <= 0.0 or (weight < least and tokens[i] > lengths[last]):
            break
        left = prior if is_prior[i] else (0.0 if is_cut[i] else 1.0)
        areas[last + 1] = areas[last] + shares[last] * (tokens[i] - lengths[last])
        lengths[last + 1], shares[last + 1] = tokens[i], shares[last] * max(0.0, 1.0 - left / weight)
        last, reached, uncut = last + 1, reached - (0 if is_prior[i] else 1), uncut - (1 if is_cut[i] else 0)
    return lengths[: last + 1], areas[: last + 1], shares[: last + 1]


class Doubt(NamedTuple):
    """Refusals by a history of which nothing has ended meanwhile: the first, the last, and what is to be forgotten."""

    since_s: float
    last_s: float
    owed: float  # observations, below 1


@dataclass
class CapClass:
    """Requests of one tier whose caps are of one magnitude, by tenant; ``ANYBODY`` is whoever is not known."""

    samples: OrderedDict[str, deque[Observation]] = field(default_factory=OrderedDict)
    size: int = 0  # observations that are kept
    _new: dict[str, int] = field(default_factory=dict)  # observations since the curve was drawn
    _curves: dict[str, Drawn] = field(default_factory=dict)
    _doubts: dict[str, Doubt] = field(default_factory=dict)  # by whose sample it is; ``ANYBODY``: everybody's

    def doubt(self, tenant: str, now_s: float) -> bool:
        """A request was refused for the length that its tenant's history tells, or everybody's; False: there is none.

        Where all are refused, none ends. So once none has for ``LONGEST_S``, that history is forgotten, the oldest of
        it first.
        """
        key = tenant if self.samples.get(tenant) else ANYBODY
        own = [self.samples[key]] if key != ANYBODY else [*self.samples.values()]
        known = sum(map(len, own))
        since_s, last_s, owed = self._doubts.get(key, Doubt(now_s, now_s, 0.0))
        if now_s - since_s > LONGEST_S:
            owed += known * (1.0 - 0.5 ** (min(now_s - last_s, LONGEST_S) / HALF_LIFE_S))
        for _ in range(min(int(owed), known)):
            max(own, key=len).popleft()
            self.size -= 1
            self._curves.clear()
        self._doubts[key] = Doubt(since_s, now_s, owed % 1.0)
        return known > 0

    def note(self, tenant: str, observation: Observation) -> None:
        """One more observation; the tenant that has been silent for longest is forgotten where there are too many."""
        if (sample := self.samples.get(tenant)) is None:
            sample = self.samples[tenant] = deque(maxlen=WINDOW)
        self._doubts.pop(tenant, None)
        self._doubts.pop(ANYBODY, None)
        self.size += len(sample) < WINDOW
        sample.append(observation)
        self.samples.move_to_end(tenant)
        for key in (tenant, EVERYBODY):
            self._new[key] = self._new.get(key, 0) + 1
        if len(self.samples) > MOST_TENANTS:
            forgotten, lost = self.samples.popitem(last=False)
            self.size -= len(lost)
            self._curves.pop(forgotten, None)
            self._new.pop(forgotten, None)
            self._doubts.pop(forgotten, None)

    def curve(self, tenant: str, prior_tokens: float) -> Curve:
        """What a request of ``tenant`` is predicted by: its own history beside everybody's, or everybody's alone."""
        everybody = self._drawn(EVERYBODY, self._of_everybody, prior_tokens, prior_tokens)
        if tenant == ANYBODY or tenant not in self.samples:
            return everybody
        return self._drawn(tenant, lambda: self.samples[tenant], everybody.mean_tokens(math.inf), prior_tokens)

    def _of_everybody(self) -> Sequence[Observation]:
        """All that is not known by tenant, and of each tenant no more than ``SHARED_OF_TENANT``."""
        found: list[Observation] = []
        for tenant, sample in self.samples.items():
            skipped = 0 if tenant == ANYBODY else max(0, len(sample) - SHARED_OF_TENANT)
            found.extend(islice(sample, skipped, None))
        return found

    def _drawn(self, key: str, sample: Callable[[], Sequence[Observation]], prior: float, configured: float) -> Curve:
        """The curve of a sample beside ``prior`` tokens: as it was, or drawn anew once the sample has changed."""
        known, new = self._curves.get(key), self._new.get(key, 0)
        if known is None or known.prior_tokens != configured or new > known.size // REFRESH:
            observed = sample()
            known = self._curves[key] = Drawn(draw_curve(observed, prior), configured, len(observed))
            self._new[key] = 0
        return known.curve


@dataclass
class TierLengths:
    """What is known of output lengths, per tier. ``tier_priors`` has those of the tiers that state one, in tokens."""

    prior_tokens: float
    tier_priors: Mapping[str, float] = field(default_factory=dict)
    classes: dict[tuple[str, int], CapClass] = field(default_factory=dict)

    def prior(self, tier: str) -> float:
        """The configured mean of a tier, in tokens."""
        return self.tier_priors.get(tier, self.prior_tokens)

    def note(self, tier: str, output_tokens: int, cap_tokens: int, is_cut: bool = False, tenant: str = "") -> None:
        """A request of ``tier`` finished after ``output_tokens``, by itself or (``is_cut``) at its cap."""
        key = tier, cap_tokens.bit_length() // CAP_BITS
        if (known := self.classes.get(key)) is None:
            known = self.classes[key] = CapClass()
        known.note(tenant, (output_tokens, is_cut))

    def doubt(self, tier: str, cap_tokens: int, tenant: str, now_s: float) -> bool:
        """A request of ``tier`` was refused for the length that is predicted (``CapClass.doubt``)."""
        known = self.classes.get((tier, cap_tokens.bit_length() // CAP_BITS))
        return known is not None and known.doubt(tenant, now_s)

    def learn(self, outcome: Outcome) -> None:
        """Note how long a request became that ended by itself or at its cap; others tell nothing."""
        if outcome.output_tokens > 0 and outcome.finish in FINISHED:
            cap_tokens = max(outcome.output_cap_tokens, outcome.output_tokens)
            is_cut = outcome.finish == "length"
            self.note(outcome.tier_asked, outcome.output_tokens, cap_tokens, is_cut, outcome.tenant)

    def estimate(
        self, tier: str, emitted_tokens: int, cap_tokens: int, tenant: str, coverage: float
    ) -> tuple[int, float]:
        """Predicted length of the whole output, and a bound that it stays below with this coverage (0 to 1), in tokens.

        The prediction is more than what was emitted and at most ``cap_tokens``. The bound is inf where too few
        requests of such caps have finished to tell one.
        """
        prior = self.prior(tier)
        known = self.classes.get((tier, cap_tokens.bit_length() // CAP_BITS))
        curve = None if known is None else known.curve(tenant, prior)
        mean = min(prior, cap_tokens) if curve is None else curve.mean_tokens(cap_tokens)
        predicted = max(emitted_tokens + 1, min(cap_tokens, round(ahead(mean, emitted_tokens))))
        if curve is None or known is None or known.size < LEAST_BOUND:
            return predicted, math.inf
        return predicted, curve.quantile_tokens(coverage, emitted_tokens)
