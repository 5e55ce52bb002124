"""How far iterations stray from a profile: quantiles of measured over predicted seconds, by kind of batch.

Between the quantiles the logarithm of the ratio is linear in the standard normal deviate. Log-normal noise is that
exactly; stalls show in a steeper last piece.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numba import njit

from profiles.batch import Bools, Floats

LEVELS = {"p5": 0.05, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p95": 0.95, "p99": 0.99}
KINDS = ("decode", "prefill")  # decodes only; with a prefill chunk
LEAST_SAMPLES = 100  # of a kind: fewer say nothing about its 99th percentile
FURTHEST = 3.5  # standard deviations beyond which nothing is drawn: one iteration in 4,000
_DEVIATES = tuple(NormalDist().inv_cdf(level) for level in LEVELS.values())
_MEDIAN = [*LEVELS].index("p50")
KNOTS = (-FURTHEST, *_DEVIATES, FURTHEST)


@dataclass(frozen=True)
class RatioQuantiles:
    """Of one kind of batch: measured over predicted seconds at ``LEVELS``, or empty where samples are too few."""

    samples: int = 0
    ratios: tuple[float, ...] = ()


@dataclass(frozen=True)
class IterationSpread:
    """The spread of iteration times around one profile."""

    decode: RatioQuantiles = RatioQuantiles()
    prefill: RatioQuantiles = RatioQuantiles()

    @property
    def is_known(self) -> bool:
        """Whether any kind has quantiles."""
        return any(getattr(self, kind).ratios for kind in KINDS)

    def problems(self) -> Iterator[tuple[str, str]]:
        """Fields that are wrong, by path, and what is wrong with each."""
        for kind in KINDS:
            found: RatioQuantiles = getattr(self, kind)
            if found.samples < 0:
                yield f"{kind}.samples", f"must not be negative, got {found.samples}"
            if not found.ratios:
                continue
            if len(found.ratios) != len(LEVELS):
                yield f"{kind}.ratios", f"must be {len(LEVELS)} numbers or none, got {len(found.ratios)}"
                continue
            before = 0.0
            for name, ratio in zip(LEVELS, found.ratios, strict=True):
                if not (0.0 < ratio < math.inf):
                    yield f"{kind}.ratios.{name}", f"must be a finite number > 0, got {ratio!r}"
                elif ratio < before:
                    yield f"{kind}.ratios.{name}", f"must not be below the quantile before it, got {ratio!r}"
                before = ratio

    def logs(self) -> Floats:
        """Logarithms of the ratios, f8[kinds, knots]; a kind without any is taken for the other one, or for exact."""
        known = [getattr(self, kind).ratios for kind in KINDS]
        exact = (1.0,) * len(LEVELS)
        return _with_ends(np.log([known[i] or known[1 - i] or exact for i in range(len(KINDS))]))

    def to_dict(self) -> dict[str, object]:
        """Plain JSON types."""
        return {kind: _to_dict(getattr(self, kind)) for kind in KINDS}


def _to_dict(found: RatioQuantiles) -> dict[str, object]:
    return {"samples": found.samples, "ratios": dict(zip(LEVELS, found.ratios, strict=False))}


def spread_of(measured_s: Floats, predicted_s: Floats, has_prefill: Bools) -> IterationSpread:
    """The spread of iterations (each argument [n]); a kind with fewer than ``LEAST_SAMPLES`` has no quantiles."""
    ratios = np.asarray(measured_s, dtype="f8") / np.asarray(predicted_s, dtype="f8")
    return IterationSpread(_quantiles(ratios[~has_prefill]), _quantiles(ratios[has_prefill]))


def _quantiles(ratios: Floats) -> RatioQuantiles:
    if len(ratios) < LEAST_SAMPLES:
        return RatioQuantiles(len(ratios))
    found = np.maximum.accumulate(np.quantile(ratios, list(LEVELS.values()))).tolist()
    return RatioQuantiles(len(ratios), tuple(float(f"{ratio:.5g}") for ratio in found))


def _with_ends(logs: Floats) -> Floats:
    """``logs`` (f8[kinds, levels]) at ``KNOTS``: beyond the outermost level with the slope from the median to it.

    The slope of the outermost piece alone would make stalls many times as long as any that was measured.
    """
    middle = logs[:, [_MEDIAN]]
    low, high = (middle + (logs[:, [at]] - middle) * FURTHEST / abs(_DEVIATES[at]) for at in (0, -1))
    return np.hstack([low, logs, high])


@njit(cache=True)
def stray_factor(logs: Floats, deviate: float) -> float:
    """How many times its prediction an iteration takes at a standard normal deviate; ``logs`` are one kind's."""
    deviate = min(max(deviate, KNOTS[0]), KNOTS[-1])
    i = 1
    while deviate > KNOTS[i]:
        i += 1
    slope = (logs[i] - logs[i - 1]) / (KNOTS[i] - KNOTS[i - 1])
    return math.exp(logs[i - 1] + slope * (deviate - KNOTS[i - 1]))


def draw_ratios(spread: IterationSpread, runs: int, iterations: int) -> list[Floats]:
    """Ratios of independent iterations, f8[runs, iterations] for each kind; always the same ones."""
    deviates = np.random.default_rng(0).standard_normal((runs, iterations))
    return [np.exp(np.interp(deviates, KNOTS, logs)) for logs in spread.logs()]
