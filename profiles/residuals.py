"""Quantiles of measured over predicted iteration times of one replica, from a histogram that forgets.

The bins are equally wide in ``asinh(log(ratio) / FINEST)``: 0.25 % of the ratio next to 1, a quarter of the deviation
further out. At ``MEMORY`` iterations of a kind all its counts are halved. Nothing is stored or sorted.

Trackers of single quantiles, with one number each, take steps that assume a density; rare stalls have another one.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit

from profiles.batch import Floats
from profiles.spread import KINDS

TRACKED = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
MEMORY = 4000.0  # iterations of a kind
LEAST_NOTED = 100  # iterations of a kind before its quantiles are told
FINEST, PER_UNIT = 0.01, 4.0
BELOW, ABOVE = 24, 26  # bins on each side of 1: ratios from 0.13 to 28; what is beyond counts in the last one
BINS = BELOW + ABOVE
HISTOGRAMS = len(KINDS) * BINS


@njit(cache=True)
def note_residual(counts: Floats, has_prefill: bool, ratio: float) -> None:
    """Count one iteration that took ``ratio`` (above 0) times its prediction; ``counts`` is f8[HISTOGRAMS], in place,
    zeros at first."""
    own = counts[BINS:] if has_prefill else counts[:BINS]
    place = math.floor(PER_UNIT * math.asinh(math.log(ratio) / FINEST)) + BELOW
    own[min(max(place, 0), BINS - 1)] += 1.0
    if own.sum() >= MEMORY:
        own *= 0.5


def told_quantiles(counts: Floats) -> dict[str, dict[str, Any]]:
    """By kind of batch the quantiles, and of how many iterations; a kind with too few has none."""
    told: dict[str, dict[str, Any]] = {}
    for kind, own in zip(KINDS, counts.reshape(len(KINDS), BINS), strict=True):
        told[kind] = {"iterations": round(float(own.sum()))}
        if own.sum() >= LEAST_NOTED:
            told[kind] |= {name: round(_quantile(own, level), 4) for name, level in TRACKED.items()}
    return told


def _quantile(own: Floats, level: float) -> float:
    """Linear within the bin."""
    reached = np.cumsum(own)
    target = level * reached[-1]
    place = int(np.searchsorted(reached, target))
    part = (target - (reached[place] - own[place])) / own[place]
    return math.exp(FINEST * math.sinh((place - BELOW + part) / PER_UNIT))
