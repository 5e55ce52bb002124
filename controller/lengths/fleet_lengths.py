"""Lengths of all requests that are in flight: an answer at once for admission, better ones off its path. Pure.

At arrival the estimator answers from statistics or, for forests, with what was last said of a request like it: a stale
bound beats a late one. The request itself is asked about in the next batch, and again every 50 tokens of its output.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from controller.lengths.conformal import Conformal
from controller.lengths.coverage import Coverage
from controller.lengths.estimate import (
    ASK_EVERY_TOKENS,
    LengthEstimate,
    LengthEstimator,
    LengthOptions,
    LengthQuery,
    ahead,
)
from controller.lengths.estimators import LASTING, UNCALIBRATED, make_estimator
from controller.lengths.fair_window import FairWindow
from controller.lengths.features import FEATURES, FeatureMaker
from controller.lengths.forest import Floats, Forest
from controller.lengths.training import LEAST_REQUESTS, Finished, TrainingSet, ask
from controller.mirror.lengths import TierLengths
from planning.limits import KV_RESERVES
from protocol.messages import FINISHED, AdmissionRequest, Outcome, Progress

FOREST, STALE = "forest", "forest, stale"  # sources of answers: of the request itself, of one like it
BATCH = 64  # requests that a forest is asked about at a time
MOST_LIVE = 1 << 16  # requests in flight that are remembered
MOST_PENDING = 4096  # questions that wait; older ones stay with the answer they have
MOST_TOKENS = 2e9  # that a bound says, as far as a row can hold
MOST_KINDS = 4096  # kinds of requests whose last answer is kept

Kind = tuple[str, str, str, str, int, int]


class Answer(NamedTuple):
    """What was said of a request after ``emitted_tokens``; ``raw_tokens`` is the bound before its calibration."""

    source: str
    emitted_tokens: int
    mean_tokens: float
    raw_tokens: float
    bound_tokens: float


@dataclass
class LiveLength:
    """A request in flight: its question, its features at arrival where a forest will be asked, and all answers."""

    query: LengthQuery
    row: Floats | None
    answers: list[Answer] = field(default_factory=list)
    next_ask_tokens: int = ASK_EVERY_TOKENS

    def told(self, emitted_tokens: int, cap_tokens: int) -> LengthEstimate:
        """The latest answer for a request that has come to ``emitted_tokens`` since, in whole tokens within its cap."""
        latest = self.answers[-1]
        return within(ahead(latest.mean_tokens, emitted_tokens), latest.bound_tokens, emitted_tokens, cap_tokens)

    def planned(self, emitted_tokens: int, cap_tokens: int, by_bound: bool) -> LengthEstimate:
        """The same as planning takes it."""
        told = self.told(emitted_tokens, cap_tokens)
        return told._replace(mean_tokens=told.bound_tokens) if by_bound else told


def within(mean_tokens: float, bound_tokens: float, emitted_tokens: int, cap_tokens: int) -> LengthEstimate:
    """Whole tokens: more than was emitted, at most the cap; the bound not below the mean."""
    least = emitted_tokens + 1
    mean = max(least, min(cap_tokens, round(mean_tokens)))
    return LengthEstimate(mean, max(mean, min(cap_tokens, round(min(bound_tokens, MOST_TOKENS)))))


class FleetLengths:
    """``prior_tokens`` and ``tier_priors`` are the configured means, in tokens."""

    def __init__(self, options: LengthOptions, prior_tokens: float, tier_priors: Mapping[str, float]) -> None:
        self.options = options
        self.tiers = TierLengths(prior_tokens, tier_priors)
        self.estimator: LengthEstimator = make_estimator(options.estimator, self.tiers)
        self.features, self.conformal, self.coverage = FeatureMaker(), Conformal(), Coverage(options.coverage)
        self.finished: FairWindow[Finished] = FairWindow(options.window)
        self.forest: Forest | None = None
        self.live: OrderedDict[str, LiveLength] = OrderedDict()
        self._pending: OrderedDict[str, int] = OrderedDict()  # emitted tokens by request id
        self._by_kind: OrderedDict[Kind, tuple[float, float]] = OrderedDict()
        self.untrained = 0  # finished requests since the last forest
        self._by_bound = options.time == "bound"

    def adopt_state(self, other: "FleetLengths") -> None:
        """Take over what another one has learnt; an estimator of another name starts from the tiers' lengths."""
        own, self.tiers = self.tiers, other.tiers
        self.tiers.prior_tokens, self.tiers.tier_priors = own.prior_tokens, own.tier_priors
        is_same = other.options.estimator == self.options.estimator
        self.estimator = other.estimator if is_same else make_estimator(self.options.estimator, self.tiers)
        self.features, self.conformal, self.forest = other.features, other.conformal, other.forest
        self.live, self._pending, self._by_kind = other.live, other._pending, other._by_kind
        for tenant, each in other.finished.entries():
            self.finished.append(tenant, each)
        self.untrained = other.untrained

    # -- questions --------------------------------------------------------------------------------------------------

    def at_arrival(self, request: AdmissionRequest) -> LengthEstimate:
        """At once: the answer that a request in flight has, or a first one for a newcomer."""
        known = self.live.get(request.request_id)
        if known is None:
            known = self._begin(request)
        elif known.answers[-1].source != FOREST:  # it asks again: what has finished since may tell more
            known.answers.pop()
            self._first_answer(known, request.emitted_tokens)
        return known.planned(request.emitted_tokens, request.max_tokens, self._by_bound)

    def mean_tokens(self, request: AdmissionRequest) -> int:
        """The mean alone, of a request whose tier is still open."""
        query = LengthQuery.of(request)
        mean = self._at_once(query, 0).mean_tokens
        return int(within(mean, mean, 0, request.max_tokens).mean_tokens)

    def at_progress(self, seen: Progress) -> LengthEstimate:
        """What is known of a request that a replica tells in full."""
        return self.further(seen, seen.emitted_tokens, seen.output_tokens, seen.output_bound_tokens)

    def further(self, seen: Progress, emitted: int, output_tokens: int, bound_tokens: int) -> LengthEstimate:
        """The same once it has ``emitted`` tokens, with these estimates until now. Every 50 tokens it is put down for
        the next batch.

        A mean by statistics stays as it was told until the request has outlived it: engines then tell one token more.
        """
        known, cap = self.live.get(seen.request_id), seen.output_cap_tokens
        told = output_tokens if output_tokens < cap else cap
        if known is None:  # decided by an earlier controller
            if told > emitted + 1:
                return LengthEstimate(told, max(told, min(cap, bound_tokens)))
            query = LengthQuery(seen.slo.tier, "", seen.prompt_tokens, cap)
            return within(*self.estimator.estimate(query, emitted, self.options.coverage), emitted, cap)
        if emitted >= known.next_ask_tokens:
            self._put_down(seen.request_id, emitted)
            known.next_ask_tokens = emitted - emitted % ASK_EVERY_TOKENS + ASK_EVERY_TOKENS
        latest = known.answers[-1]
        if latest.source == FOREST or self._by_bound:
            return known.planned(emitted, cap, self._by_bound)
        if told <= emitted + 1:
            mean = self.estimator.estimate(known.query, emitted, self.options.coverage).mean_tokens
            return within(mean, latest.bound_tokens, emitted, cap)
        bound = latest.bound_tokens
        bound = cap if bound >= cap else round(min(bound, MOST_TOKENS))
        return LengthEstimate(told, bound if bound > told else told)

    def refresh(self, most: int = BATCH) -> int:
        """Answer up to ``most`` of the questions that wait, in one batch; returns how many."""
        taken = [self._pending.popitem(last=False) for _ in range(min(most, len(self._pending)))]
        asked = [(known, emitted) for name, emitted in taken if (known := self.live.get(name)) is not None]
        with_rows = [(known, emitted) for known, emitted in asked if known.row is not None]
        if self.forest is not None and with_rows:
            rows = np.array([known.row for known, _ in with_rows], dtype=np.float32)
            emitted_tokens = np.array([emitted for _, emitted in with_rows], dtype=np.int64)
            told = ask(self.forest, rows, emitted_tokens, self.options.coverage).tolist()
            for (known, emitted), (mean, raw) in zip(with_rows, told, strict=True):
                self._answer(known, FOREST, emitted, LengthEstimate(mean, raw))
                if not emitted:
                    self._remember(known.query, (mean, raw))
            asked = [each for each in asked if each[0].row is None]
        for known, emitted in asked:
            raw_estimate = self.estimator.estimate(known.query, emitted, self.options.coverage)
            self._answer(known, self.estimator.name, emitted, raw_estimate)
        return len(taken)

    def _begin(self, request: AdmissionRequest) -> LiveLength:
        query = LengthQuery.of(request)
        row = self.features.row(query) if self.options.estimator == FOREST else None
        known = self.live[request.request_id] = LiveLength(query, row)
        if len(self.live) > MOST_LIVE:
            self.live.popitem(last=False)
        known.next_ask_tokens = request.emitted_tokens + ASK_EVERY_TOKENS
        self._first_answer(known, request.emitted_tokens)
        if row is not None and self.forest is not None:
            self._put_down(request.request_id, request.emitted_tokens)
        return known

    def _first_answer(self, known: LiveLength, emitted: int) -> None:
        kept = self._kept(known.query) if known.row is not None and not emitted else None
        raw = LengthEstimate(*kept) if kept else self._at_once(known.query, emitted)
        self._answer(known, STALE if kept else self.estimator.name, emitted, raw)

    def _at_once(self, query: LengthQuery, emitted_tokens: int) -> LengthEstimate:
        return self.estimator.estimate(query, emitted_tokens, self.options.coverage)

    def _answer(self, known: LiveLength, source: str, emitted: int, raw: LengthEstimate) -> None:
        bound = raw.bound_tokens
        if source not in UNCALIBRATED:
            bound = self.conformal.bound_tokens(source, emitted, bound, self.options.coverage)
        known.answers.append(Answer(source, emitted, raw.mean_tokens, raw.bound_tokens, bound))

    def _put_down(self, request_id: str, emitted_tokens: int) -> None:
        self._pending[request_id] = emitted_tokens
        if len(self._pending) > MOST_PENDING:
            self._pending.popitem(last=False)

    def _kept(self, query: LengthQuery) -> tuple[float, float] | None:
        """What a forest last said of a request like this one: of the same program, or at least of the same kind."""
        return self._by_kind.get(kind_of(query, query.traits.program)) or self._by_kind.get(kind_of(query, ""))

    def _remember(self, query: LengthQuery, told: tuple[float, float]) -> None:
        for program in dict.fromkeys((query.traits.program, "")):  # in this order: the oldest goes first
            kind = kind_of(query, program)
            self._by_kind[kind] = told
            self._by_kind.move_to_end(kind)
        while len(self._by_kind) > MOST_KINDS:
            self._by_kind.popitem(last=False)

    # -- what finished requests tell ----------------------------------------------------------------------------------

    def learn(self, outcome: Outcome) -> float | None:
        """A request ended. One that ended by itself or at its cap is learnt from.

        Returns the mean that was told at its arrival, None where that is not known.
        """
        known = self.live.pop(outcome.request_id, None)
        self._pending.pop(outcome.request_id, None)
        if outcome.output_tokens <= 0 or outcome.finish not in FINISHED:
            return None
        output, cap = outcome.output_tokens, max(outcome.output_cap_tokens, outcome.output_tokens)
        query = LengthQuery(outcome.tier_asked, outcome.tenant, 0, cap) if known is None else known.query
        is_cut = outcome.finish == "length"
        self.estimator.learn(query._replace(tier=outcome.tier_asked, cap_tokens=cap), output, is_cut)
        if known is None:
            return None
        for each in known.answers:
            if each.emitted_tokens < output:
                bound = min(each.bound_tokens, cap)
                self.conformal.note(each.source, each.emitted_tokens, each.raw_tokens, output, query.tenant)
                self.coverage.note(each.emitted_tokens, each.mean_tokens, bound, output, cap)
        if known.row is not None:
            self.finished.append(query.tenant, Finished(known.row, output))
            self.untrained += 1
            self.features.learn(query, output)
        return known.answers[0].mean_tokens

    def doubt(self, request: AdmissionRequest, now_s: float) -> bool:
        """A request was refused for its predicted length, and not by the configured mean; whether that may pass."""
        asked = request.slo.tier, request.max_tokens, request.tenant
        return self.options.estimator not in LASTING and self.tiers.doubt(*asked, now_s)

    def training_set(self) -> TrainingSet | None:
        """The window, where a forest is to be grown now."""
        is_due = self.untrained >= (self.options.train_every if self.forest else LEAST_REQUESTS)
        if self.options.estimator != FOREST or not is_due or len(self.finished) < LEAST_REQUESTS:
            return None
        self.untrained = 0
        return TrainingSet.of(list(self.finished))

    def learn_anew(self) -> None:
        """Have the next forest grown at once: lengths have drifted away from what was told."""
        self.untrained = max(self.untrained, self.options.train_every, LEAST_REQUESTS)

    @property
    def next_version(self) -> int:
        return self.forest.version + 1 if self.forest else 1

    def set_forest(self, forest: Forest) -> None:
        """Ask this forest from now on; an older one than that in force is ignored. Raises ``ValueError``."""
        if forest.features != len(FEATURES):
            raise ValueError(f"forest: is of {forest.features} features, {len(FEATURES)} are known")
        if self.forest is None or forest.version > self.forest.version:
            self.forest = forest

    # -- what it tells ------------------------------------------------------------------------------------------------

    @property
    def kv_reserve(self) -> int:
        """Of ``planning.limits.LIMITS``."""
        return KV_RESERVES.index(self.options.kv_room)

    def status(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "estimator": self.options.estimator,
            "kv_room": self.options.kv_room,
            "version": self.forest.version if self.forest else 0,
            "window": len(self.finished),
            "waiting": len(self._pending),
            **self.coverage.summary(),
        }


def kind_of(query: LengthQuery, program: str) -> Kind:
    """Requests that a forest can hardly tell apart."""
    half_octave = (query.prompt_tokens * query.prompt_tokens).bit_length()
    return query.tier, query.tenant, query.traits.app, program, half_octave, query.cap_tokens.bit_length()
