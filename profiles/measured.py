"""From repeated samples of a live engine to a profile: medians per composition, a fit, and how far to trust it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from profiles.batch import MEASUREMENT, Batch, Floats, Table
from profiles.fit import fit_roofline, quality_of
from profiles.grid import Stage
from profiles.profile import Profile, Provenance
from profiles.quality import FitQuality, fit_quality
from profiles.spread import spread_of


class Sample(NamedTuple):
    """One iteration as it ran."""

    batch: Batch
    seconds: float
    cpu_s: float  # CPU time that the engine's process got meanwhile


FOLDS = 5
NOMINAL = ("decode_seqs", "kv_tokens_each", "chunk_tokens", "cached_tokens_asked")  # of the stage a sample is from
SAMPLE = np.dtype([*MEASUREMENT.descr, ("cpu_s", "f8"), *((name, "f8") for name in NOMINAL), ("repeat", "f8")])
LEAST_CPU_SHARE = 0.95


def sample_rows(stage: Stage, repeat: int, taken: list[Sample]) -> Table:
    """SAMPLE rows of one stage, with the stage's composition and the pass over the grid beside each."""
    rows = np.zeros(len(taken), dtype=SAMPLE)
    for row, (batch, seconds, cpu_s) in zip(rows, taken, strict=True):
        for name, value in batch._asdict().items():
            row[name] = value
        row["seconds"], row["cpu_s"], row["repeat"] = seconds, cpu_s, repeat
        row["decode_seqs"], row["kv_tokens_each"] = stage.decode_seqs, stage.kv_tokens_each
        row["chunk_tokens"], row["cached_tokens_asked"] = batch.prefill_tokens, batch.cached_tokens
    return rows


def undisturbed(samples: Table) -> Table:
    """Samples of an engine on one CPU core during which it really had that core, not some other process."""
    return samples[samples["cpu_s"] >= LEAST_CPU_SHARE * samples["seconds"]]


def medians(samples: Table) -> tuple[Table, Floats]:
    """One MEASUREMENT row per nominal composition, and the relative spread of its samples.

    Seconds are the median of the samples; the composition is their mean (decodes grow while they are measured). The
    spread is the interquartile range over the median.
    """
    keys = np.stack([samples[name] for name in NOMINAL], axis=1)
    _, group = np.unique(keys, axis=0, return_inverse=True)
    rows, spread = np.zeros(group.max() + 1, dtype=MEASUREMENT), np.zeros(group.max() + 1)
    for number in range(len(rows)):
        members = samples[group == number]
        for name in Batch._fields:
            rows[number][name] = members[name].mean()
        low, middle, high = np.percentile(members["seconds"], [25, 50, 75])
        rows[number]["seconds"], spread[number] = middle, (high - low) / middle
    return rows, spread


def profile_of(name: str, samples: Table, kv_capacity_tokens: int, source: str, notes: tuple[str, ...] = ()) -> Profile:
    """Fit the shipped form to the samples' medians; ``fit_off_grid`` is from points left out of the fit in turn.

    The spread is that of all samples around the fit: what the form cannot say, and what differs from time to time.
    """
    rows, spread = medians(samples)
    model = fit_roofline(rows)
    fastest_s, slowest_s = rows["seconds"].min(), rows["seconds"].max()
    taken = (
        f"{len(samples)} iterations of {len(rows)} compositions, {fastest_s * 1e3:.1f}-{slowest_s * 1e3:.0f} ms; "
        f"medians; interquartile range {100 * np.median(spread):.1f} % of the median (half of the compositions), "
        f"{100 * np.percentile(spread, 95):.1f} % (95 % of them)"
    )
    return Profile(
        name=name,
        coefficients=model.coefficients,
        kv_capacity_tokens=kv_capacity_tokens,
        measured=model.measured,
        fit=quality_of(model, rows, "every measured composition"),
        provenance=Provenance(source, notes=(taken, *notes)),
        fit_off_grid=held_out_quality(rows),
        spread=spread_of(samples["seconds"], model.iterations_s(samples), samples["prefill_seqs"] > 0),
    )


def held_out_quality(rows: Table, folds: int = FOLDS) -> FitQuality:
    """Errors on rows that the fit did not see: every ``folds``-th row left out in turn, in a fixed random order."""
    order = np.random.default_rng(0).permutation(len(rows))
    predicted = np.zeros(len(rows))
    for fold in range(folds):
        left_out = order[fold::folds]
        seen = np.setdiff1d(order, left_out)
        predicted[left_out] = fit_roofline(rows[seen]).iterations_s(rows[left_out])
    return fit_quality(predicted, rows["seconds"], f"left out of the fit in turn, {folds} folds")
