"""Kernel tables: units, what does not fit, the region that counts, the overhead on top."""

import numpy as np
import pytest

from profiles.batch import Batch, decodes
from profiles.kernel_times import (
    FITS,
    KERNEL_COLUMNS,
    fit_rows,
    in_serving_region,
    kernel_measurements,
    profile_of_kernels,
)
from profiles.profile import Provenance
from tests.support.planted_profile import COEFFICIENTS, planted_model

POINTS = [(d, k, p, c) for d in (0, 1, 16, 128) for k in ((128, 2048) if d else (0,)) for p in (0, 64, 512, 4096)
          for c in ((0, 2048) if p else (0,)) if d + p]  # fmt: skip


def columns() -> dict[str, np.ndarray]:
    batches = [(decodes(d, k) if d else Batch(0.0, sequences=0.0), p, c) for d, k, p, c in POINTS]
    milliseconds = [1e3 * planted_model().iteration_s(b.with_chunk(p, c) if p else b) for b, p, c in batches]
    values = np.column_stack([np.array(POINTS, dtype=float), milliseconds])
    return dict(zip(KERNEL_COLUMNS, values.T, strict=True)) | {FITS: np.ones(len(POINTS))}


def test_milliseconds_become_seconds_and_what_does_not_fit_is_left_out() -> None:
    table = columns()
    table[FITS][:5] = 0
    rows = kernel_measurements(table)
    assert len(rows) == len(POINTS) - 5
    assert rows["seconds"] == pytest.approx(table["iteration_ms"][5:] / 1e3)


def test_regions_are_cut_by_time() -> None:
    rows = kernel_measurements(columns())
    assert fit_rows(rows)["seconds"].max() <= 0.150
    serving = in_serving_region(rows)["seconds"]
    assert serving.min() >= 0.005
    assert serving.max() <= 0.120


def test_the_fit_is_of_kernel_times_and_the_overhead_goes_on_top() -> None:
    profile = profile_of_kernels("k", kernel_measurements(columns()), 10_000, Provenance("a test"), 1e-3, 2e-5)
    assert profile.kernel_coefficients == pytest.approx(COEFFICIENTS, rel=1e-5, abs=1e-14)
    assert profile.fit.worst_pct < 1e-3
    assert profile.includes_engine_overhead
    bare = profile_of_kernels("k", kernel_measurements(columns()), 10_000, Provenance("a test"), 0.0, 0.0)
    assert not bare.includes_engine_overhead
