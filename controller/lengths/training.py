"""The sliding window that forests are grown of, and the two steps of asking: rows to samples, samples to figures. Pure.

Growing takes seconds. The live controller has it done in another process (``controller.length_trainer``), the
simulator at once; both call ``grow_from``.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from controller.lengths.estimate import ASK_EVERY_TOKENS
from controller.lengths.features import FEATURES, with_emitted
from controller.lengths.forest import Floats, Forest, grow

# Emitted tokens at which each finished request is a row: the same for all, or long outputs would be too few or too many
# among those that got so far.
POSITIONS = (0, *(ASK_EVERY_TOKENS << k for k in range(12)))
LEAST_REQUESTS = 60  # before which no forest is grown
THIN = 20  # samples beyond what was emitted, below which they tell no quantile
MOST_ROWS = 6000  # of one training; requests are thinned out evenly beyond


class Finished(NamedTuple):
    """A finished request: its features at arrival (f4[features]) and its output."""

    row: Floats
    output_tokens: int


class TrainingSet(NamedTuple):
    """What travels to who grows: rows at arrival (f4[n, features]) and output tokens (i8[n])."""

    rows: Floats
    output_tokens: NDArray[np.int64]

    @classmethod
    def of(cls, finished: list[Finished]) -> "TrainingSet":
        rows = np.array([each.row for each in finished], dtype=np.float32).reshape(-1, len(FEATURES))
        return cls(rows, np.array([each.output_tokens for each in finished], dtype=np.int64))


def expanded(known: TrainingSet) -> tuple[Floats, NDArray[np.float64]]:
    """Every request at each of ``POSITIONS`` that it went beyond: rows (f4[m, features]) and its output (f8[m])."""
    at = [known.output_tokens > position for position in POSITIONS]
    at[0][:] = True
    total = int(sum(each.sum() for each in at))
    if total > MOST_ROWS:
        kept = np.linspace(0, len(known.rows) - 1, int(len(known.rows) * MOST_ROWS / total)).astype(np.int64)
        known = TrainingSet(known.rows[kept], known.output_tokens[kept])
        at = [each[kept] for each in at]
    rows = [
        with_emitted(known.rows[each], np.full(each.sum(), position))
        for each, position in zip(at, POSITIONS, strict=True)
    ]
    tokens = np.concatenate([known.output_tokens[each] for each in at])
    return np.concatenate(rows), tokens.astype(np.float64)


def grow_from(known: TrainingSet, version: int, seed: int) -> Forest:
    """A forest of a window; raises ``ValueError`` where that is too small."""
    if len(known.rows) < LEAST_REQUESTS:
        raise ValueError(f"forest: {len(known.rows)} finished requests, at least {LEAST_REQUESTS} are needed")
    rows, tokens = expanded(known)
    return grow(rows, tokens, version, seed)


def ask(forest: Forest, rows: Floats, emitted_tokens: NDArray[np.int64], coverage: float) -> NDArray[np.float64]:
    """Mean and raw upper bound of the whole outputs (f8[n, 2]) of requests (f4[n, features], at arrival) by now.

    Of the samples only those count that are longer than what was emitted. Where they are few, as much again is taken
    to be still ahead as a bound, and half as much as a mean.
    """
    samples = forest.samples(with_emitted(rows, emitted_tokens)).astype(np.float64)
    count = samples.shape[1]
    passed = (samples <= emitted_tokens[:, None]).sum(axis=1)
    left = count - passed
    sums = np.concatenate((np.zeros((len(rows), 1)), np.cumsum(samples, axis=1)), axis=1)
    each = np.arange(len(rows))
    mean = (sums[:, -1] - sums[each, passed]) / np.maximum(1, left)
    place = np.minimum(count - 1, passed + np.maximum(0, np.ceil(coverage * left).astype(np.int64) - 1))
    bound = samples[each, place]
    is_thin = left < THIN
    mean = np.where(is_thin, np.maximum(mean * (left > 0), 1.5 * emitted_tokens), mean)
    bound = np.where(is_thin, np.maximum(bound, 2.0 * emitted_tokens), bound)
    least = emitted_tokens + 1.0
    return np.stack((np.maximum(mean, least), np.maximum(bound, least)), axis=1)
