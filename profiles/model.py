"""Performance models behind one protocol: the shipped roofline and the published forms it is compared with.

A model turns a batch into seconds, and knows the range of batches that it was fitted on. It never sees SLOs, queues or
the clock. What planning asks of the shipped form, its inverse included, is in ``profiles.kernels``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numba import njit
from numpy.typing import NDArray

from profiles import kernels
from profiles.batch import Batch, Floats, MeasuredRange, Table


class PerfModel(Protocol):
    """What every form answers. ``name`` is its key in ``profiles.fit.FORMS``."""

    @property
    def name(self) -> str: ...

    @property
    def measured(self) -> MeasuredRange:
        """The box of batches the model was fitted on; outside of it answers are extrapolations."""
        ...

    def iterations_s(self, batches: Table) -> Floats:
        """Seconds of each iteration (f8[rows]) of a BATCH table; 0 for an empty batch."""
        ...


@dataclass(frozen=True, eq=False)
class RooflineModel:
    """The shipped form: two roofline lines, KV reads, prefill attention and per-sequence overhead."""

    coefficients: Floats
    measured: MeasuredRange
    name: str = "roofline"

    def iteration_s(self, batch: Batch) -> float:
        """Seconds of one iteration; 0 for an empty batch."""
        return float(kernels.iteration_s(self.coefficients, *batch.terms))

    def iterations_s(self, batches: Table) -> Floats:
        return _roofline_s(self.coefficients, np.ascontiguousarray(batches))


@njit(cache=True)
def _roofline_s(coef: Floats, batches: Table) -> Floats:
    seconds = np.empty(len(batches))
    for i in range(len(batches)):
        row = batches[i]
        seconds[i] = kernels.iteration_s(
            coef, row["batch_tokens"], row["kv_tokens"], row["pairs"], row["sequences"], row["spec_steps"]
        )
    return seconds


@dataclass(frozen=True, eq=False)
class PlainModel:
    """SLOs-Serve section 3.1.1 as published: ``max_l(k1_l * tokens + k2_l * spec_steps + b_l)``, l = 1, 2."""

    lines: Floats  # float64[2, 3]: k1, k2, b of each line, seconds
    measured: MeasuredRange
    name: str = "slos-serve"

    def iterations_s(self, batches: Table) -> Floats:
        k1, k2, b = self.lines.T[:, :, None]
        seconds = (k1 * batches["batch_tokens"] + k2 * batches["spec_steps"] + b).max(axis=0)
        return np.where(batches["batch_tokens"] > 0, seconds, 0.0)


@dataclass(frozen=True, eq=False)
class LookupModel:
    """PolyServe section 4.5: a table from (batch tokens, KV tokens) to seconds, bilinear between its nodes.

    KV tokens are those read by decodes plus the cached context of prefill chunks. Node values never fall along either
    axis, so that the largest batch within a time can be read off; beyond the last node the value stays at the edge.
    """

    batch_axis: Floats  # increasing batch tokens
    kv_axis: Floats  # increasing KV tokens
    seconds: Floats  # float64[len(batch_axis), len(kv_axis)]
    measured: MeasuredRange
    name: str = "polyserve-table"

    def iterations_s(self, batches: Table) -> Floats:
        kv_tokens = batches["kv_tokens"] + batches["cached_tokens"]
        weights = bilinear_weights(self.batch_axis, self.kv_axis, batches["batch_tokens"], kv_tokens)
        seconds = sum(w * self.seconds[i, j] for i, j, w in weights)
        return np.where(batches["batch_tokens"] > 0, seconds, 0.0)


Corner = tuple[NDArray[np.intp], NDArray[np.intp], Floats]


def bilinear_weights(xs: Floats, ys: Floats, x: Floats, y: Floats) -> list[Corner]:
    """The four nodes around each point of ``(x, y)``, as (row, column, weight); points beyond an edge are put on it."""
    i, u = _cell(xs, x)
    j, v = _cell(ys, y)
    return [(i, j, (1 - u) * (1 - v)), (i, j + 1, (1 - u) * v), (i + 1, j, u * (1 - v)), (i + 1, j + 1, u * v)]


def _cell(axis: Floats, values: Floats) -> tuple[NDArray[np.intp], Floats]:
    cell = np.clip(np.searchsorted(axis, values, side="right") - 1, 0, len(axis) - 2)
    return cell, np.clip((values - axis[cell]) / (axis[cell + 1] - axis[cell]), 0.0, 1.0)


@dataclass(frozen=True, eq=False)
class LinearModel:
    """The annealing paper's equations 14 and 15: ``alpha * b * l + beta * b + gamma * l + delta``, each phase its own.

    ``b`` is the number of sequences of the phase and ``l`` their mean length (tokens prefilled now; KV tokens for
    decodes). The paper has no mixed iterations: they are charged as one phase after the other.
    """

    prefill: Floats  # float64[4]: alpha, beta, gamma, delta, seconds
    decode: Floats
    measured: MeasuredRange
    name: str = "annealing"

    def iterations_s(self, batches: Table) -> Floats:
        decode_seqs = batches["sequences"] - batches["prefill_seqs"]
        prefill_s = linear_features(batches["prefill_seqs"], batches["prefill_tokens"]) @ self.prefill
        decode_s = linear_features(decode_seqs, batches["kv_tokens"]) @ self.decode
        return np.asarray(prefill_s + decode_s)


def linear_features(sequences: Floats, total_tokens: Floats) -> Floats:
    """Rows of ``(b * l, b, l, 1)``, all zero where the phase has no sequence; ``b * l`` is the total length."""
    present = sequences > 0
    mean_length = np.divide(total_tokens, sequences, out=np.zeros(len(sequences)), where=present)
    return np.stack([total_tokens * present, sequences * present, mean_length, present.astype("f8")], axis=1)
