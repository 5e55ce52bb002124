"""Engines that form iterations ahead, as vLLM does on GPUs: what it costs, and what forming them late gives back.

``python -m benchmarks.formed_ahead --json OUT``. One simulated A100 whose iterations stray by 10 %, in scenarios of
SLOs-Serve near the capacity of the live controller. vLLM forms a second iteration when the one before begins, so a
newcomer waits for the rest of one and for all of another; ``late``, shortly before that one ends (``planning.lead``).
The controller of ``unaware`` is told that nothing is formed ahead. Every system sees the same arrivals.
"""

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import typer

from benchmarks.result_file import write_result
from profiles.profile import Profile
from protocol.messages import Report
from simulation.core.loop import Simulation
from simulation.core.metrics import Window
from simulation.dispatchers.live_fleet import ControllerDispatcher
from simulation.experiments.registry import Context
from simulation.experiments.slos_serve import DRAFT_S, GPUS, SYSTEMS, setting
from simulation.studies.capacity import attainment_of, run_system
from simulation.studies.promised import tally
from simulation.studies.systems import NOISES, FleetOf, System

CASES = (  # scenario, programs, rate per second: about the capacity, and 1.5 times it where arrivals come in bursts
    ("Coder", 2205, 2.3),
    ("Coder", 2205, 3.4),
    ("Mixed", 1200, 4.5),
    ("Summarizer", 400, 7.0),
    ("ChatBot", 400, 10.5),
    ("Reasoning", 400, 0.35),
)
LIVE = FleetOf("live", admits=True, replicas=1, straying=NOISES["noise10"])
SYNCHRONOUS, AHEAD, LATE = "one in flight", "two in flight", "two in flight, late"
UNAWARE = f"{AHEAD}, unaware"


class Unaware(ControllerDispatcher):
    """Its replicas do not tell that their engines form iterations ahead."""

    def report(self, simulation: Simulation, r: int) -> Report:
        return msgspec.structs.replace(super().report(simulation, r), steps_in_flight=1)


@dataclass(frozen=True)
class UnawareFleet(FleetOf):
    """The live fleet over such replicas."""

    def dispatcher(self, profile: Profile, jobs: np.ndarray, seed: int = 0) -> ControllerDispatcher:
        made = super().dispatcher(profile, jobs, seed)
        assert isinstance(made, ControllerDispatcher)
        return Unaware(made.profile, made.tiers, made.options, programs=made.programs, report_s=made.report_s)


def systems() -> dict[str, System]:
    """What is compared, by name."""
    noise, ahead, found = NOISES["noise10"], NOISES["ahead"], dict[str, System]()
    for name, system in {"": LIVE, "no-admission, ": SYSTEMS["no-admission"]}.items():
        found[name + SYNCHRONOUS] = replace(system, straying=noise)
        found[name + AHEAD] = replace(system, straying=ahead, forms_late=False)
        found[name + LATE] = replace(system, straying=ahead, forms_late=True)
    return found | {UNAWARE: UnawareFleet("live", admits=True, replicas=1, straying=ahead, forms_late=False)}


def play(context: Context, scenario: str, programs: int, rate: float, seeds: int) -> list[dict[str, Any]]:
    """Every system in one scenario."""
    profile, make = setting(context.traces, GPUS[0], scenario, programs)
    points = []
    for seed in range(1, seeds + 1):
        for name, system in systems().items():
            simulation = run_system(replace(system, draft_s=DRAFT_S[GPUS[0]]), profile, make(rate, seed), seed)
            window = Window.of(simulation.jobs)
            asked, promised, kept = tally(simulation.jobs, simulation.records, window)
            points.append({"scenario": scenario, "rate": rate, "system": name, "seed": seed,
                           "attained": attainment_of(simulation, window).worst_tier,
                           "asked": asked, "promised": promised, "kept": kept,
                           **ttft_errors(simulation)})  # fmt: skip
            print(points[-1], flush=True)
    return points


def ttft_errors(simulation: Simulation) -> dict[str, float]:
    """Measured less predicted time to the first token of promised requests, in seconds: median, and P95."""
    told = (
        simulation.dispatcher.outcomes.predicted_ttft_s
        if isinstance(simulation.dispatcher, ControllerDispatcher)
        else {}
    )
    jobs = [job for job in told if simulation.records["promised"][job]]
    if not jobs:
        return {}
    measured_s = simulation.records["first_s"][jobs] - simulation.jobs["arrival_s"][jobs]
    late_s = measured_s - np.array([told[job] for job in jobs])
    return {"late_p50_s": float(np.median(late_s)), "late_p95_s": float(np.quantile(late_s, 0.95))}


def main(
    traces: Annotated[Path, typer.Option(help="Folder with the traces.")] = Path("../shared/traces"),
    json: Annotated[Path | None, typer.Option(help="Result file.")] = None,
    seeds: Annotated[int, typer.Option(help="How many.")] = 2,
) -> None:
    """Play every case, print and write."""
    if not traces.is_dir():
        raise typer.BadParameter(f"no folder {traces}: the scenarios need the Azure traces", param_hint="--traces")
    context = Context(traces, time.perf_counter)
    points = [point for case in CASES for point in play(context, *case, seeds)]
    if json is not None:
        headline = {}
        for name in systems():
            own = [point for point in points if point["system"] == name]
            headline[f"attained, {name}"] = round(float(np.mean([p["attained"] for p in own])), 4)
            if promised := sum(p["promised"] for p in own):
                headline[f"kept, {name}"] = round(sum(p["kept"] for p in own) / promised, 4)
        write_result(
            json, "formed_ahead", config={"cases": CASES}, seeds=range(1, seeds + 1), headline=headline, points=points
        )


if __name__ == "__main__":
    typer.run(main)
