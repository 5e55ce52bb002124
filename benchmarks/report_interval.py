"""What old news costs: the share of requests that attain when replicas report less often.

``python -m benchmarks.report_interval --json OUT``. The live controller's ``Fleet`` over one simulated replica whose
iterations stray by 10 %, in the coding scenario at a rate near the capacity; every interval sees the same arrivals.
"""

import statistics
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.result_file import write_result
from benchmarks.trace_context import TRACES, TracesOption, context_of
from simulation.core.metrics import Window, attained
from simulation.experiments.registry import Context
from simulation.experiments.slos_serve import DRAFT_S, GPUS, setting
from simulation.studies.capacity import run_system
from simulation.studies.systems import NOISES, FleetOf

SCENARIO, NOISE, PROGRAMS, RATE = "Coder", "noise10", 400, 11.0
INTERVALS_S = (0.15, 0.075, 0.03, 0.02, 0.01)
SEEDS = (1, 2, 3, 4, 6, 7, 8, 9, 10, 11, 12)  # 5 has no request in its window


def attained_share(context: Context, interval_s: float, seed: int) -> float:
    """Of the judged requests of one run."""
    profile, make = setting(context.traces, GPUS[0], SCENARIO, PROGRAMS)
    system = FleetOf("live", admits=True, replicas=1, report_s=interval_s)
    system = replace(system, straying=NOISES[NOISE], draft_s=DRAFT_S[GPUS[0]])
    simulation = run_system(system, profile, make(RATE, seed), seed)
    heads = Window.of(simulation.jobs).first_requests(simulation.jobs)
    return float(attained(simulation.jobs, simulation.records)["dslo"][heads].mean())


def main(
    traces: TracesOption = TRACES,
    json: Annotated[Path | None, typer.Option(help="Result file.")] = None,
) -> None:
    """Play every interval with every seed, print and write."""
    context, points = context_of(traces), list[dict[str, Any]]()
    for interval_s in INTERVALS_S:
        shares = [attained_share(context, interval_s, seed) for seed in SEEDS]
        points.append({"interval_s": interval_s, "attained": statistics.fmean(shares), "per_seed": shares})
        gains = np.array(shares) - np.array(points[0]["per_seed"])
        spread = gains.std(ddof=1) / len(gains) ** 0.5
        gain = f"{gains.mean():+.4f} +- {spread:.4f}"
        print(f"{1e3 * interval_s:5.0f} ms: {points[-1]['attained']:.4f} ({gain})", flush=True)
    if json is not None:
        headline = {f"attained_{1e3 * p['interval_s']:g}ms": round(p["attained"], 4) for p in points}
        config = {"scenario": SCENARIO, "noise": NOISE, "programs": PROGRAMS, "rate": RATE}
        write_result(json, "report_interval", config=config, seeds=SEEDS, headline=headline, points=points)


if __name__ == "__main__":
    typer.run(main)
