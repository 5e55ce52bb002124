"""What admission costs or gains near the capacity: the live controller's ``Fleet`` beside the same batches without it.

``python -m benchmarks.admission_gain --json OUT``. One simulated A100 in scenarios of SLOs-Serve, at rates near the
capacity of ``no-admission``, which sheds what can no longer attain and promises nothing. With ``sessions``, clients
name the session that a round is of. Every system sees the same arrivals, and forms batches by the same policy. Best
effort may prolong iterations as on live engines under the controller, and by half an empty one without it.

On engines that stray, two more variants give back what is kept beyond the confidence asked for: promises ask for no
chance, or forecasts leave out the model's measured error.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import typer

from benchmarks.result_file import write_result
from benchmarks.trace_context import TRACES, TracesOption, context_of
from controller import calibration
from controller.mirror import correction
from simulation.core.metrics import Window
from simulation.experiments.registry import Context
from simulation.experiments.slos_serve import DRAFT_S, GPUS, SYSTEMS, setting
from simulation.studies.capacity import attainment_of, run_system
from simulation.studies.promised import tally
from simulation.studies.systems import NOISES, FleetOf

NO_ADMISSION = "no-admission"
LIVE = FleetOf("live", admits=True, replicas=1)
TRIED = {"live": LIVE, "live, sessions": replace(LIVE, names_sessions=True), NO_ADMISSION: SYSTEMS[NO_ADMISSION]}
GIVING_BACK = {"live, any chance": LIVE, "live, no caution": LIVE}
CASES = (  # scenario, programs, rate per second, seeds; 4,410 arrivals are half of the coding trace
    ("Reasoning", 400, 0.40, (1, 2, 3)),
    ("ToolLLM", 4410, 0.46, (1,)),
    ("Coder", 4410, 2.4, (1,)),
    ("Mixed", 4410, 4.4, (1,)),
    ("Summarizer", 400, 7.0, (1, 2, 3)),
)


def less_careful(system: str) -> AbstractContextManager[Any]:
    """The controller's own carefulness as a variant has it, while it runs."""
    if system == "live, any chance":
        return patch.multiple(calibration, FIRST_CHANCE=0.0, CHANCE_RATE=0.0)
    return patch.object(correction, "MOST_CAUTION", 0.0) if system == "live, no caution" else nullcontext()


def play(context: Context, case: tuple[str, int, float, tuple[int, ...]], noise: str) -> list[dict[str, Any]]:
    """Every system in one scenario under one noise."""
    scenario, programs, rate, seeds = case
    profile, make = setting(context.traces, GPUS[0], scenario, programs)
    points = []
    for name, system in (TRIED | GIVING_BACK if noise != "exact" else TRIED).items():
        if name == "live, sessions" and scenario != "ToolLLM":
            continue  # one request is a whole task there
        straying = replace(system, straying=NOISES[noise], draft_s=DRAFT_S[GPUS[0]])
        for seed in seeds:
            with less_careful(name):
                simulation = run_system(straying, profile, make(rate, seed), seed)
            window = Window.of(simulation.jobs)
            asked, promised, kept = tally(simulation.jobs, simulation.records, window)
            points.append({"scenario": scenario, "noise": noise, "rate": rate, "system": name, "seed": seed,
                           "attained": attainment_of(simulation, window).worst_tier,
                           "asked": asked, "promised": promised, "kept": kept})  # fmt: skip
            print(points[-1], flush=True)
    return points


def main(
    traces: TracesOption = TRACES,
    json: Annotated[Path | None, typer.Option(help="Result file.")] = None,
) -> None:
    """Play every case on exact engines and on ones that stray by 10 %, print and write."""
    context = context_of(traces)
    points = [point for noise in ("exact", "noise10") for case in CASES for point in play(context, case, noise)]
    if json is not None:
        headline = {}
        for point in points:
            key = f"{point['scenario']}, {point['noise']}, {point['system']}"
            own = [p for p in points if all(p[name] == point[name] for name in ("scenario", "noise", "system"))]
            headline[key] = round(sum(p["attained"] for p in own) / len(own), 4)
        write_result(json, "admission_gain", config={"cases": CASES}, seeds=(1, 2, 3), headline=headline, points=points)


if __name__ == "__main__":
    typer.run(main)
