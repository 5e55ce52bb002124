"""Bounds brought to their nominal coverage by how recent ones turned out. Pure.

Conformalized quantile regression (Romano et al. 2019) in its multiplicative form: the score of a finished request is
its remaining length over what the raw bound allowed. The bound is stretched by the quantile of the recent scores.
Every score comes from an answer that was given before its request had finished, so it is of held-out data.
"""

import math
from bisect import bisect_left, insort

from controller.lengths.estimate import ASK_EVERY_TOKENS
from controller.lengths.fair_window import FairWindow

WINDOW = 400  # scores that count: those of earlier forests, which knew less, are soon gone
LEAST = 40  # scores of a group, before which another one stands for it
FRESH = 10  # scores after which the factor is computed anew
BOUNDS = (0.02, 20.0)  # of the factor
FINE = 20  # positions with a group of their own; beyond, groups double
GROUPS = FINE + 10


def group_of(emitted_tokens: int) -> int:
    """Requests that have emitted about as much are calibrated together: what is left of them is alike."""
    position = emitted_tokens // ASK_EVERY_TOKENS
    return position if position < FINE else min(GROUPS - 1, FINE + int(math.log2(position / FINE)))


class Scores:
    """The recent scores of one group, and the factor for the next bound."""

    def __init__(self) -> None:
        self.recent: FairWindow[float] = FairWindow(WINDOW)
        self._sorted: list[float] = []  # the same, ascending
        self._factor: float | None = None  # as computed last
        self._new = 0

    def note(self, tenant: str, score: float) -> None:
        if (left := self.recent.append(tenant, score)) is not None:
            del self._sorted[bisect_left(self._sorted, left)]
        insort(self._sorted, score)
        self._new += 1

    def factor(self, coverage: float) -> float:
        """The ``ceil((n + 1) * coverage)``-th smallest of n scores, within ``BOUNDS``."""
        if self._new >= FRESH or self._factor is None:
            count = len(self.recent)
            place = min(count, math.ceil((count + 1) * coverage))
            self._factor = min(max(self._sorted[place - 1], BOUNDS[0]), BOUNDS[1])
            self._new = 0
        return self._factor


class Conformal:
    """Scores by who gave the raw bound and how far the request was."""

    def __init__(self) -> None:
        self.scores: dict[tuple[str, int], Scores] = {}

    def bound_tokens(self, source: str, emitted_tokens: int, raw_tokens: float, coverage: float) -> float:
        """The calibrated bound of a raw one."""
        factor = 1.0
        for group in range(group_of(emitted_tokens), -1, -1):  # where few have come so far, as those shortly before
            scores = self.scores.get((source, group))
            if scores is not None and len(scores.recent) >= LEAST:
                factor = scores.factor(coverage)
                break
        return emitted_tokens + factor * (raw_tokens - emitted_tokens)

    def note(self, source: str, emitted_tokens: int, raw_tokens: float, output_tokens: int, tenant: str) -> None:
        """A request ended after ``output_tokens``, for which ``raw_tokens`` was the bound at ``emitted_tokens``."""
        known = self.scores.setdefault((source, group_of(emitted_tokens)), Scores())
        allowed_tokens = max(1.0, raw_tokens - emitted_tokens)
        known.note(tenant, max(0, output_tokens - emitted_tokens) / allowed_tokens)
