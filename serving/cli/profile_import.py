"""From aiconfigurator's kernel tables to a profile: the grid, the range check, the fit, the estimate of overhead."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from profiles.batch import Floats, Table
from profiles.kernel_times import (
    FITS,
    KERNEL_COLUMNS,
    REGION,
    in_serving_region,
    kernel_measurements,
    profile_of_kernels,
)
from profiles.profile import Profile, Provenance
from serving.cli.aiconfigurator import ATTRIBUTION, ImporterError, KernelTimes, grid, version


@dataclass(frozen=True, eq=False)
class KernelGrid:
    """Kernel times of one model on one system over the grid, and what was left out as beyond the measured rows."""

    columns: dict[str, Floats]  # KERNEL_COLUMNS and FITS
    kv_capacity_tokens: int
    left_out: int
    source: str

    @property
    def rows(self) -> Table:
        """MEASUREMENT rows that fit in the KV cache."""
        return kernel_measurements(self.columns)


def kernel_grid(kernels: KernelTimes, kv_capacity_tokens: int | None, memory_fraction: float) -> KernelGrid:
    """Evaluate the grid within the measured rows; the KV capacity is computed where it is not given."""
    capacity = kv_capacity_tokens or kernels.kv_capacity_tokens(memory_fraction)
    points = list(grid())
    inside = [point for point in points if not kernels.limits.problem(*point)]
    if not inside:
        raise ImporterError("no point of the grid lies within the measured rows of this model and system")
    values = np.array([(*point, kernels.iteration_ms(*point)) for point in inside])
    columns = dict(zip(KERNEL_COLUMNS, values.T, strict=True))
    held = columns["num_decode_seqs"] * columns["mean_kv_len_tokens"]
    held = held + columns["num_prefill_tokens"] + columns["prefill_context_tokens"]
    columns[FITS] = (held <= capacity).astype("f8")
    source = (
        f"aiconfigurator-core {version()}: {kernels.model} on {kernels.tensor_parallel} x {kernels.system}, kernels of "
        f"vLLM {kernels.backend_version}, bfloat16"
    )
    return KernelGrid(columns, capacity, len(points) - len(inside), source)


def import_profile(name: str, table: KernelGrid, overhead_s: float, overhead_per_sequence_s: float) -> Profile:
    """Fit a kernel grid and add ``overhead_s + overhead_per_sequence_s * sequences`` for the engine around them.

    Raises:
        ImporterError: where nothing of the grid is what an engine would want to run.
    """
    if not len(in_serving_region(table.rows)):
        raise ImporterError(f"no point of the grid {REGION}; the KV cache has {table.kv_capacity_tokens} tokens")
    notes = (
        "Kernel times summed by a model, not an end-to-end measurement.",
        f"{table.left_out} grid points beyond the measured attention or GEMM rows were left out, not extrapolated.",
        f"Engine overhead of {overhead_s * 1e3:g} ms + {overhead_per_sequence_s * 1e3:g} ms per sequence was added.",
    )
    provenance = Provenance(table.source, ATTRIBUTION, notes)
    return profile_of_kernels(
        name, table.rows, table.kv_capacity_tokens, provenance, overhead_s, overhead_per_sequence_s
    )
