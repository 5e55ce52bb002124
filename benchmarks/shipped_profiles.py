"""Makes the GPU profiles that ship in ``profiles/builtin`` from the kernel tables of development checkouts.

``python -m benchmarks.shipped_profiles`` writes them; a test makes them again and compares.
"""

from __future__ import annotations

import statistics
from dataclasses import replace

import typer

from benchmarks.kernel_tables import KernelTable, OffGrid, load_tables
from profiles.fit import quality_of
from profiles.kernel_times import FIT_UP_TO_S, profile_of_kernels
from profiles.profile import Profile, Provenance
from profiles.quality import FitQuality
from profiles.store import BUILTIN, save_profile

# KV tokens: (0.9 * HBM - weights - 3e9) / KV bytes per token, per GPU, bfloat16 (HBM sizes as in aiconfigurator-core).
TABLES = {
    "h200_sxm__llama-3.1-8b__tp1": 894144,
    "h100_sxm__llama-3.1-8b__tp1": 444403,
    "a100_sxm__llama-3.1-8b__tp1": 444403,
    "h200_sxm__qwen2.5-14b__tp1": 527535,
    "h100_sxm__llama-3.1-70b__tp4": 476471,
}
VLLM_KERNELS = {"a100_sxm": "0.14.0"}  # the others: 0.24.0
OFF_GRID_POINTS, OFF_GRID_SEEDS = 1500, (1, 2, 3)
ATTRIBUTION = (
    "Derived from the measured kernel tables of aiconfigurator-core 0.12.0 "
    "(Apache-2.0, (c) 2025-2026 NVIDIA CORPORATION & AFFILIATES)"
)
NOTES = (
    "Kernel times summed by a model, not an end-to-end measurement: vLLM backend, bf16 weights, KV and attention; "
    "about half of the time is from GEMM shapes transferred from measured neighbours (held-out error 4.6-5.1 %).",
    "Engine overhead of 0.95 ms + 0.0354 ms per sequence is added: an estimate from 30 end-to-end rows of another "
    "model (Qwen3-32B, H100, vLLM 0.12.0, RMS 0.6 ms). Subtract it for kernel times (overhead_* fields).",
    "fit and fit_off_grid are errors against the kernel times, without overhead. fit_off_grid: 1500 random "
    "compositions, half decodes only, half with a chunk, interpolated part by part between grid points; the median "
    "of 3 seeds.",
    "A replica corrects slope and intercept online from its own step times.",
)


def shipped_name(table: str) -> str:
    """Profile name of a table: one GPU needs no mention."""
    return table.removesuffix("__tp1")


def off_grid_quality(table: KernelTable, profile: Profile) -> FitQuality:
    """The median seed's quality of the kernel coefficients off the grid."""
    model = replace(profile.model, coefficients=profile.kernel_coefficients)
    truth = OffGrid(table)
    found = [
        quality_of(model, truth.sample(OFF_GRID_POINTS, seed), "off the grid, 5-120 ms") for seed in OFF_GRID_SEEDS
    ]
    middle = statistics.median_low(quality.mape_pct for quality in found)
    return next(quality for quality in found if quality.mape_pct == middle)


def make_profile(table: KernelTable) -> Profile:
    """Fit one kernel table, add the estimate of engine overhead, and try it off the grid."""
    system = table.name.split("__")[0]
    source = (
        f"least absolute relative error on {len(table.fitted)} grid points that fit in the KV cache and take up to "
        f"{FIT_UP_TO_S * 1e3:.0f} ms; {system}, kernels of vLLM {VLLM_KERNELS.get(system, '0.24.0')}"
    )
    provenance = Provenance(source, ATTRIBUTION, NOTES)
    profile = profile_of_kernels(shipped_name(table.name), table.rows, table.kv_capacity_tokens, provenance)
    return replace(profile, fit_off_grid=off_grid_quality(table, profile))


def main() -> None:
    """Write every shipped GPU profile."""
    for table in load_tables(TABLES):
        profile = make_profile(table)
        save_profile(profile, BUILTIN / f"{profile.name}.json")
        typer.echo(f"{profile.name}: grid {profile.fit}; off grid {profile.fit_off_grid}")


if __name__ == "__main__":
    typer.run(main)
