"""The composition of one engine iteration, as a scalar record, as table rows, and the box it was measured in.

Nothing here knows how long an iteration takes; that is ``profiles.model``.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray


class Batch(NamedTuple):
    """One iteration's composition; ``batch.terms`` are the arguments of ``profiles.kernels.iteration_s``.

    ``kv_tokens`` are read by decodes, ``pairs`` is ``sum_i P_i * (C_i + P_i / 2)`` over prefill chunks. The last three
    describe the prefill part once more for models that look at it apart; they are counted in the first ones already.
    """

    batch_tokens: float
    kv_tokens: float = 0.0
    pairs: float = 0.0
    sequences: float = 1.0
    spec_steps: float = 0.0
    prefill_seqs: float = 0.0
    prefill_tokens: float = 0.0
    cached_tokens: float = 0.0

    @property
    def terms(self) -> tuple[float, float, float, float, float]:
        """Batch tokens, KV tokens, pairs, sequences and speculation steps, in the kernels' order."""
        return self[:5]

    def with_chunk(self, chunk_tokens: float, cached_tokens: float = 0.0) -> Batch:
        """This batch plus one sequence's prefill chunk on ``cached_tokens`` of its context."""
        return Batch(
            self.batch_tokens + chunk_tokens,
            self.kv_tokens,
            self.pairs + chunk_tokens * (cached_tokens + 0.5 * chunk_tokens),
            self.sequences + 1,
            self.spec_steps,
            self.prefill_seqs + 1,
            self.prefill_tokens + chunk_tokens,
            self.cached_tokens + cached_tokens,
        )


BATCH = np.dtype([(name, "f8") for name in Batch._fields])
MEASUREMENT = np.dtype([*((name, "f8") for name in Batch._fields), ("seconds", "f8")])
Table = NDArray[np.void]  # rows of BATCH, or of MEASUREMENT where seconds are known
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


def decodes(sequences: int, kv_tokens_each: float) -> Batch:
    """``sequences`` decodes of one token each, every one reading ``kv_tokens_each`` KV tokens."""
    return Batch(float(sequences), sequences * kv_tokens_each, 0.0, float(sequences))


def compositions(
    decode_seqs: ArrayLike, kv_tokens_each: ArrayLike, chunk_tokens: ArrayLike, cached_tokens: ArrayLike
) -> Table:
    """BATCH rows of D decodes at KV length K beside one prefill chunk of P tokens on C cached ones (P = 0: none)."""
    asked = (decode_seqs, kv_tokens_each, chunk_tokens, cached_tokens)
    d, k, p, c = np.broadcast_arrays(*(np.atleast_1d(np.asarray(x, dtype="f8")) for x in asked))
    rows = np.zeros(d.shape, dtype=BATCH)
    has_chunk = p > 0
    rows["batch_tokens"], rows["kv_tokens"] = d + p, d * k
    rows["pairs"], rows["sequences"] = p * (c + 0.5 * p), d + has_chunk
    rows["prefill_seqs"], rows["prefill_tokens"], rows["cached_tokens"] = has_chunk, p, np.where(has_chunk, c, 0.0)
    return rows


def measurements(batches: Table, seconds: ArrayLike) -> Table:
    """MEASUREMENT rows: the given BATCH rows with the seconds each took."""
    rows = np.zeros(len(batches), dtype=MEASUREMENT)
    for name in Batch._fields:
        rows[name] = batches[name]
    rows["seconds"] = seconds
    return rows


@dataclass(frozen=True)
class MeasuredRange:
    """The box of compositions that were measured: ``(lowest, highest)`` per term of the model."""

    batch_tokens: tuple[float, float]
    kv_tokens: tuple[float, float]
    pairs: tuple[float, float]
    sequences: tuple[float, float]
    spec_steps: tuple[float, float] = (0.0, 0.0)

    @staticmethod
    def of(batches: Table) -> MeasuredRange:
        """The smallest box around ``batches`` (at least one row)."""
        if not len(batches):
            raise ValueError("no measurements: a measured range needs at least one row")
        return MeasuredRange(
            **{f.name: (float(batches[f.name].min()), float(batches[f.name].max())) for f in fields(MeasuredRange)}
        )
