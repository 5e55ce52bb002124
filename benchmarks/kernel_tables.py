"""Kernel-time tables derived from aiconfigurator: reading, serving region, and a truth for points off their grid.

The tables are made by ``polyslo profile import aiconfigurator``; copies for five GPU/model pairs lie beside the project
in development checkouts (``../shared/profiles``). Times are sums of measured kernel times, without engine overhead.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from profiles.batch import Bools, Floats, Table, compositions, measurements
from profiles.kernel_times import fit_rows, in_serving_region, kernel_measurements
from profiles.store import load_columns

FOLDER = Path(__file__).resolve().parents[2] / "shared" / "profiles"


@dataclass(frozen=True, eq=False)
class KernelTable:
    """One GPU/model pair: its grid, and the kernel times of its parts on it."""

    name: str
    columns: dict[str, Floats]
    kv_capacity_tokens: int

    @property
    def rows(self) -> Table:
        """All measured grid points that fit in the KV cache."""
        return kernel_measurements(self.columns)

    @property
    def fitted(self) -> Table:
        """Rows that fits see."""
        return fit_rows(self.rows)

    @property
    def serving(self) -> Table:
        """Rows in the serving region, where quality is reported."""
        return in_serving_region(self.rows)


def load_tables(kv_capacity_tokens: dict[str, int], folder: Path = FOLDER) -> list[KernelTable]:
    """The tables of the named pairs, in the order of their names."""
    return [
        KernelTable(name, load_columns(folder / f"{name}.parquet"), capacity)
        for name, capacity in sorted(kv_capacity_tokens.items())
    ]


class OffGrid:
    """Truth between grid points: ``g(B) + decode attention(D, K / D) + prefill attention(P, C)``.

    Each part is interpolated linearly between its measured values, and only inside cells whose corners were all
    measured (0.35-0.94 % mean error against the kernel tables themselves).
    """

    def __init__(self, table: KernelTable) -> None:
        self.table = table
        c = table.columns
        attention_ms = c["decode_attention_ms"] + c["prefill_attention_ms"]
        self.tokens, self.rest_ms = _median_by(c["batch_tokens"], c["iteration_ms"] - attention_ms)
        self.decode = _Grid.of(c["num_decode_seqs"], c["mean_kv_len_tokens"], c["decode_attention_ms"])
        self.prefill = _Grid.of(c["num_prefill_tokens"], c["prefill_context_tokens"], c["prefill_attention_ms"])

    def sample(self, points: int, seed: int, chunk_alone: bool = False) -> Table:
        """MEASUREMENT rows at ``points`` random compositions in the serving region.

        D, K / D and P are log-uniform over the grid; half of the iterations carry a chunk, half of the chunks stand on
        cached context (uniform over the grid). ``chunk_alone`` gives iterations without decodes instead.
        """
        random = np.random.default_rng(seed)
        found = in_serving_region(self.table.rows[:0])
        while len(found) < points:
            n = 2 * points
            decode_seqs, kv_each = _log_uniform(random, 1, 512, n), _log_uniform(random, 128, 32768, n)
            chunk, cached = _log_uniform(random, 64, 8192, n), random.uniform(0, 8192, n).round()
            if chunk_alone:
                decode_seqs, kv_each = np.zeros(n), np.zeros(n)
            else:
                chunk = np.where(random.random(n) < 0.5, chunk, 0.0)
            cached = np.where((chunk > 0) & (random.random(n) < 0.5), cached, 0.0)
            seconds, known = self.seconds(decode_seqs, kv_each, chunk, cached)
            rows = measurements(compositions(decode_seqs, kv_each, chunk, cached), seconds)
            used_tokens = rows["kv_tokens"] + rows["prefill_tokens"] + rows["cached_tokens"]
            fits = known & (used_tokens <= self.table.kv_capacity_tokens)
            found = np.concatenate([found, in_serving_region(rows[fits])])
        return found[:points]

    def seconds(self, decode_seqs: Floats, kv_each: Floats, chunk: Floats, cached: Floats) -> tuple[Floats, Bools]:
        """Kernel time of each composition and whether it lies inside measured cells (the time is NaN where not)."""
        batch = decode_seqs + chunk
        rest_ms = np.interp(batch, self.tokens, self.rest_ms, left=np.nan, right=np.nan)
        decode_ms = np.where(decode_seqs > 0, self.decode.at(decode_seqs, kv_each), 0.0)
        prefill_ms = np.where(chunk > 0, self.prefill.at(chunk, cached), 0.0)
        seconds = (rest_ms + decode_ms + prefill_ms) / 1e3
        return seconds, np.isfinite(seconds)


@dataclass(frozen=True, eq=False)
class _Grid:
    """Values on the crossings of two axes, NaN where there is no measurement."""

    xs: Floats
    ys: Floats
    values: Floats

    @staticmethod
    def of(x: Floats, y: Floats, value: Floats) -> _Grid:
        used = x > 0
        xs, i = np.unique(x[used], return_inverse=True)
        ys, j = np.unique(y[used], return_inverse=True)
        values = np.full((len(xs), len(ys)), np.nan)
        values[i, j] = value[used]
        return _Grid(xs, ys, values)

    def at(self, x: Floats, y: Floats) -> Floats:
        """Bilinear; NaN outside and in cells with a corner that was not measured."""
        i = np.clip(np.searchsorted(self.xs, x, side="right") - 1, 0, len(self.xs) - 2)
        j = np.clip(np.searchsorted(self.ys, y, side="right") - 1, 0, len(self.ys) - 2)
        u = (x - self.xs[i]) / (self.xs[i + 1] - self.xs[i])
        v = (y - self.ys[j]) / (self.ys[j + 1] - self.ys[j])
        low = self.values[i, j] * (1 - v) + self.values[i, j + 1] * v
        high = self.values[i + 1, j] * (1 - v) + self.values[i + 1, j + 1] * v
        inside = (u >= 0) & (u <= 1) & (v >= 0) & (v <= 1)
        return np.where(inside, low * (1 - u) + high * u, np.nan)


def _median_by(key: Floats, value: Floats) -> tuple[Floats, Floats]:
    keys, group = np.unique(key, return_inverse=True)
    return keys, np.array([np.median(value[group == g]) for g in range(len(keys))])


def _log_uniform(random: np.random.Generator, low: float, high: float, n: int) -> Floats:
    return np.rint(np.exp(random.uniform(np.log(low), np.log(high), n)))
