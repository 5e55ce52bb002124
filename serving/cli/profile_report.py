"""Profiles for human eyes: a table on the terminal, and a picture of predicted against measured."""

from __future__ import annotations

from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Column
from rich.table import Table as RichTable

from profiles.batch import Table
from profiles.fit import kinds
from profiles.profile import COEFFICIENT_NAMES, Profile
from profiles.spread import KINDS, LEVELS

UNITS = ("ms/token", "ms", "ms/token", "ms", "ns/KV token", "ns/token pair", "us/sequence", "us/step")
FACTORS = (1e3, 1e3, 1e3, 1e3, 1e9, 1e9, 1e6, 1e6)
COLOURS = {"decode": "#2a6fbb", "chunk": "#d1495b", "mixed": "#6a994e"}
LABELS = {"decode": "decodes only", "chunk": "prefill only", "mixed": "both"}


def profile_tables(profile: Profile) -> RenderableType:
    """Coefficients, measured range, quality and origin."""
    facts = RichTable(title=profile.name, show_header=False)
    facts.add_row("KV capacity", f"{profile.kv_capacity_tokens:,} tokens")
    facts.add_row("fit", f"{profile.fit} ({profile.fit.region})")
    if profile.fit_off_grid:
        facts.add_row("off the grid", f"{profile.fit_off_grid} ({profile.fit_off_grid.region})")
    facts.add_row("engine overhead", _overhead(profile))
    for kind, told in spread_lines(profile).items():
        facts.add_row(f"spread, {kind}", told)
    for name, (low, high) in vars(profile.measured).items():
        facts.add_row(f"measured {name}", f"{low:,.0f} to {high:,.0f}")
    facts.add_row("source", profile.provenance.source)
    for note in (profile.provenance.attribution, *profile.provenance.notes):
        if note:
            facts.add_row("", note)
    terms = RichTable("coefficient", "value", "unit", "without overhead")
    values = zip(COEFFICIENT_NAMES, profile.coefficients, profile.kernel_coefficients, FACTORS, UNITS, strict=True)
    for name, value, kernel, factor, unit in values:
        terms.add_row(name, f"{value * factor:.5g}", unit, f"{kernel * factor:.5g}")
    return Group(facts, terms)


def spread_lines(profile: Profile) -> dict[str, str]:
    """By kind of batch the quantiles of measured over predicted iteration time, in words."""
    if profile.spread is None:
        return {"all batches": "not known: iterations are taken for exact"}
    labels, told = {"decode": "decodes only", "prefill": "with prefill"}, {}
    for kind in KINDS:
        found = getattr(profile.spread, kind)
        quantiles = ", ".join(f"{name} {ratio:.3f}" for name, ratio in zip(LEVELS, found.ratios, strict=False))
        told[labels[kind]] = f"{quantiles or 'too few'} ({found.samples:,} iterations; measured over predicted)"
    return told


def _overhead(profile: Profile) -> str:
    if not profile.includes_engine_overhead:
        return "not included: kernel times"
    if not profile.overhead_intercept_s and not profile.overhead_per_sequence_s:
        return "included: the engine itself was measured"
    return (
        f"estimate added: {profile.overhead_intercept_s * 1e3:g} ms "
        f"+ {profile.overhead_per_sequence_s * 1e3:g} ms per sequence"
    )


def profile_list(profiles: list[Profile]) -> RichTable:
    """One line per profile."""
    table = RichTable(Column("name", no_wrap=True), "KV tokens", "MAPE", "P95", "8 decodes at 1k", "chunk of 512")
    from profiles.batch import Batch, decodes

    for profile in profiles:
        decode_ms = 1e3 * profile.model.iteration_s(decodes(8, 1024))
        chunk_ms = 1e3 * profile.model.iteration_s(Batch(0.0, sequences=0.0).with_chunk(512))
        quality = (f"{profile.fit.mape_pct:.1f} %", f"{profile.fit.p95_pct:.1f} %")
        table.add_row(
            profile.name, f"{profile.kv_capacity_tokens:,}", *quality, f"{decode_ms:.1f} ms", f"{chunk_ms:.1f} ms"
        )
    return table


def plot_fit(profile: Profile, rows: Table, path: Path) -> None:
    """Predicted against measured milliseconds, and the relative error over the measured time, as a PNG.

    ``rows`` are the measurements that were fitted; profiles with added overhead are compared without it.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    model = type(profile.model)(profile.kernel_coefficients, profile.measured)
    predicted_ms, measured_ms = model.iterations_s(rows) * 1e3, rows["seconds"] * 1e3
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    scatter, errors = figure.subplots(1, 2)
    ends = [measured_ms.min() * 0.9, measured_ms.max() * 1.1]
    scatter.plot(ends, ends, color="#999999", linewidth=1)
    errors.axhline(0, color="#999999", linewidth=1)
    for kind, chosen in kinds(rows).items():
        x, y = measured_ms[chosen], predicted_ms[chosen]
        scatter.scatter(x, y, s=9, alpha=0.6, color=COLOURS[kind], label=f"{LABELS[kind]} ({chosen.sum()})")
        errors.scatter(x, 100 * (y / x - 1), s=9, alpha=0.6, color=COLOURS[kind])
    scatter.set(xscale="log", yscale="log", xlabel="measured, ms", ylabel="predicted, ms", title=profile.name)
    scatter.legend(frameon=False)
    errors.set(xscale="log", xlabel="measured, ms", ylabel="error, %", title=str(profile.fit).split(" over")[0])
    figure.savefig(path, dpi=130)
