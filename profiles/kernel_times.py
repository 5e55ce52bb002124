"""Profiles from kernel-time tables: their columns, the region of them that counts, the fit, the added overhead."""

from __future__ import annotations

import numpy as np

from profiles.batch import Floats, Table, compositions, measurements
from profiles.fit import fit_roofline, quality_of
from profiles.profile import Profile, Provenance, with_overhead

KERNEL_COLUMNS = (
    "num_decode_seqs",
    "mean_kv_len_tokens",
    "num_prefill_tokens",
    "prefill_context_tokens",
    "iteration_ms",
)
FITS = "fits_in_kv_cache"
FIT_UP_TO_S = 0.150
SERVING_S = (0.005, 0.120)
REGION = "fits in the KV cache and takes 5-120 ms"
# Engine overhead around the kernels where nothing better is known: measured TPOT less kernel sums of Qwen3-32B on H100
# under vLLM 0.12.0 (30 end-to-end rows of aiconfigurator's sample, RMS 0.6 ms). An order of magnitude.
OVERHEAD_INTERCEPT_S, OVERHEAD_PER_SEQUENCE_S = 0.95e-3, 0.0354e-3


def kernel_measurements(columns: dict[str, Floats]) -> Table:
    """MEASUREMENT rows of a kernel table (KERNEL_COLUMNS, times in ms, and FITS), where they fit in the KV cache."""
    decode_seqs, kv_tokens_each, chunk_tokens, cached_tokens, milliseconds = (columns[name] for name in KERNEL_COLUMNS)
    batches = compositions(decode_seqs, kv_tokens_each, chunk_tokens, cached_tokens)
    rows = measurements(batches, np.asarray(milliseconds) / 1e3)
    return rows[np.asarray(columns[FITS], dtype=bool)]


def in_serving_region(rows: Table) -> Table:
    """Rows that take between 5 and 120 ms: an iteration that a serving engine would want to run."""
    low, high = SERVING_S
    return rows[(rows["seconds"] >= low) & (rows["seconds"] <= high)]


def fit_rows(rows: Table) -> Table:
    """Rows that fits see: a little beyond the serving region, up to 150 ms."""
    return rows[rows["seconds"] <= FIT_UP_TO_S]


def profile_of_kernels(
    name: str,
    rows: Table,
    kv_capacity_tokens: int,
    provenance: Provenance,
    overhead_intercept_s: float = OVERHEAD_INTERCEPT_S,
    overhead_per_sequence_s: float = OVERHEAD_PER_SEQUENCE_S,
) -> Profile:
    """Fit kernel times and add ``overhead_intercept_s + overhead_per_sequence_s * sequences`` for the engine.

    The quality is that of the kernel coefficients on the kernel times in the serving region.
    """
    model = fit_roofline(fit_rows(rows))
    return Profile(
        name=name,
        coefficients=with_overhead(model.coefficients, overhead_intercept_s, overhead_per_sequence_s),
        kv_capacity_tokens=kv_capacity_tokens,
        measured=model.measured,
        fit=quality_of(model, in_serving_region(rows), REGION),
        provenance=provenance,
        includes_engine_overhead=overhead_intercept_s > 0 or overhead_per_sequence_s > 0,
        overhead_intercept_s=overhead_intercept_s,
        overhead_per_sequence_s=overhead_per_sequence_s,
    )
