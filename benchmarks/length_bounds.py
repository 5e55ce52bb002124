"""What asking a length forest costs the controller, and what growing one costs its process.

``python -m benchmarks.length_bounds --json OUT``. Forests are of the shipped size, grown of log-normal lengths. Batches
of 64 and of 1, and the library's own ``predict``, run interleaved.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console

from benchmarks.result_file import write_result
from controller.lengths.estimate import LengthOptions
from controller.lengths.fleet_lengths import BATCH
from controller.lengths.training import ask, expanded, grow_from
from simulation.experiments.length_cost import refresher, training_set

COVERAGE = 0.9


def milliseconds(work: Callable[[], object]) -> float:
    """Wall time of one call."""
    started_s = time.perf_counter()
    work()
    return 1000.0 * (time.perf_counter() - started_s)


def measure(requests: int, rounds: int, seed: int) -> dict[str, Any]:
    """One forest: milliseconds of each kind of call, all rounds."""
    from quantile_forest import RandomForestQuantileRegressor

    from controller.lengths.forest import LEAF_SAMPLES, LEAST_LEAF, MOST_DEPTH, TREES

    known, grown = training_set(requests, seed), time.perf_counter()
    forest = grow_from(known, 1, seed)
    grow_s = time.perf_counter() - grown
    rows, tokens = expanded(known)
    sizes = dict(min_samples_leaf=LEAST_LEAF, max_samples_leaf=LEAF_SAMPLES, max_depth=MOST_DEPTH, max_features=0.6)
    library = RandomForestQuantileRegressor(TREES, random_state=seed, **sizes).fit(rows, np.log(tokens))
    asked, emitted = known.rows[:BATCH], np.zeros(BATCH, dtype=np.int64)
    waiting = refresher(forest)
    spent: dict[str, list[float]] = {"batch_64": [], "refresh_64": [], "single": [], "library_64": []}
    for turn in range(rounds):
        lengths = waiting(turn)
        spent["batch_64"].append(milliseconds(lambda: ask(forest, asked, emitted, COVERAGE)))
        spent["refresh_64"].append(milliseconds(lengths.refresh))
        spent["single"].append(milliseconds(lambda: ask(forest, asked[:1], emitted[:1], COVERAGE)))
        spent["library_64"].append(milliseconds(lambda: library.predict(asked, quantiles=[0.5, COVERAGE])))
    medians = {name: statistics.median(times) for name, times in spent.items()}
    worst = {f"{name}_p99": float(np.percentile(times, 99)) for name, times in spent.items()}
    return {"seed": seed, "rows": len(rows), "nodes": len(forest.feature), "grow_s": grow_s, **medians, **worst}


def headline(points: list[dict[str, Any]]) -> dict[str, float]:
    """Medians over the seeds; the P99 of the worst."""
    return {
        "ms_per_64": round(statistics.median(p["refresh_64"] for p in points), 3),
        "ms_per_64_p99": round(max(p["refresh_64_p99"] for p in points), 3),
        "ms_single": round(statistics.median(p["single"] for p in points), 3),
        "library_over_ours": round(statistics.median(p["library_64"] / p["batch_64"] for p in points), 2),
        "grow_s": round(statistics.median(p["grow_s"] for p in points), 2),
    }


def main(
    json_path: Annotated[Path | None, typer.Option("--json", help="result file")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="a smaller window and fewer rounds")] = False,
) -> None:
    """Measure asking and growing."""
    requests, rounds, seeds = (800, 30, (1,)) if quick else (LengthOptions().window, 200, (1, 2, 3))
    points = [measure(requests, rounds, seed) for seed in seeds]
    Console(width=120).print(points, headline(points))
    if json_path:
        config = {"requests": requests, "rounds": rounds, "batch": BATCH, "coverage": COVERAGE}
        write_result(json_path, "length_bounds", config=config, seeds=seeds, headline=headline(points), points=points)


if __name__ == "__main__":
    typer.run(main)
