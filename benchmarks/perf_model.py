"""How well every form of the iteration-time model fits every kernel table, on its grid and between its points.

``python -m benchmarks.perf_model --json OUT``. Kernel times, without engine overhead; the shipped form is ``roofline``.
Fits see grid points up to 150 ms; errors are counted where an iteration takes 5-120 ms. Off the grid: random
compositions, half decodes only and half with a chunk, per seed; chunks alone are reported beside them.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Column
from rich.table import Table as RichTable

from benchmarks.kernel_tables import FOLDER, KernelTable, OffGrid, load_tables
from benchmarks.result_file import write_result
from benchmarks.shipped_profiles import OFF_GRID_POINTS, OFF_GRID_SEEDS, TABLES
from profiles.fit import FORMS, kinds, quality_of
from profiles.kernel_times import REGION
from profiles.quality import fit_quality

SHIPPED = "roofline"


def evaluate(table: KernelTable, points: int, seeds: tuple[int, ...]) -> list[dict[str, Any]]:
    """One record per form: quality on the grid (and per kind of iteration), off it per seed, and on lone chunks."""
    truth, serving = OffGrid(table), table.serving
    samples = [truth.sample(points, seed) for seed in seeds]
    lone_chunks = truth.sample(points, seeds[0], chunk_alone=True)
    records = []
    for form, fit in FORMS.items():
        model = fit(table.fitted)
        predicted = model.iterations_s(serving)
        off_grid = [quality_of(model, sample) for sample in samples]
        by_kind = {
            kind: fit_quality(predicted[rows], serving["seconds"][rows]).mape_pct
            for kind, rows in kinds(serving).items()
        }
        records.append(
            {
                "table": table.name,
                "form": form,
                "grid": asdict(quality_of(model, serving)),
                "grid_mape_pct_by_kind": by_kind,
                "off_grid": [asdict(quality) for quality in off_grid],
                "off_grid_mape_pct": statistics.median(quality.mape_pct for quality in off_grid),
                "off_grid_lone_chunks": asdict(quality_of(model, lone_chunks)),
            }
        )
    return records


def headline(records: list[dict[str, Any]]) -> dict[str, float]:
    """The worst table of the shipped form, on and off the grid, in percent."""
    shipped = [record for record in records if record["form"] == SHIPPED]
    return {
        "mape_grid_worst": max(record["grid"]["mape_pct"] for record in shipped),
        "mape_offgrid_worst": max(record["off_grid_mape_pct"] for record in shipped),
    }


def to_rich(records: list[dict[str, Any]]) -> RichTable:
    """All records, one line each; percentages."""
    names = ("R2", "MAPE", "P95", "worst", "decodes", "chunks", "mixed", "off grid", "lone chunks")
    table = RichTable(Column("table", no_wrap=True), Column("form", no_wrap=True), *names)
    for record in records:
        grid, by_kind = record["grid"], record["grid_mape_pct_by_kind"]
        errors = [grid["mape_pct"], grid["p95_pct"], grid["worst_pct"], *by_kind.values()]
        errors += [record["off_grid_mape_pct"], record["off_grid_lone_chunks"]["mape_pct"]]
        cells = [record["table"], record["form"], f"{grid['r2']:.4f}", *(f"{error:.1f}" for error in errors)]
        table.add_row(*cells, style="bold" if record["form"] == SHIPPED else None)
    return table


def main(
    json_path: Annotated[Path | None, typer.Option("--json", help="result file")] = None,
    tables: Annotated[Path, typer.Option(help="folder of the kernel tables")] = FOLDER,
    quick: Annotated[bool, typer.Option("--quick", help="fewer points off the grid")] = False,
) -> None:
    """Fit every form to every kernel table."""
    if not tables.is_dir():
        raise typer.BadParameter(
            f"no kernel tables at {tables}; they are made by 'polyslo profile import aiconfigurator'"
        )
    points, seeds = (300, OFF_GRID_SEEDS) if quick else (OFF_GRID_POINTS, OFF_GRID_SEEDS)
    records = [record for table in load_tables(TABLES, tables) for record in evaluate(table, points, seeds)]
    console = Console(width=160)
    console.print(to_rich(records))
    console.print(headline(records))
    if json_path:
        config = {"region": REGION, "off_grid_points": points, "shipped_form": SHIPPED}
        write_result(json_path, "perf_model", config=config, seeds=seeds, headline=headline(records), points=records)


if __name__ == "__main__":
    typer.run(main)
