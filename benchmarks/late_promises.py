"""Promises under steady overload, in virtual time: kept ones by the chance that was told, and how late the others are.

``python -m benchmarks.late_promises --json OUT``. One simulated A100 under the live controller's ``Fleet`` in
SLOs-Serve's scenarios of programs with one round, at about 1.5 times their capacity, on engines that stray.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.admission_gain import LIVE
from benchmarks.result_file import write_result
from benchmarks.trace_context import TRACES, TracesOption, context_of
from protocol.messages import Verdict
from simulation.core.metrics import Window
from simulation.experiments.registry import Context
from simulation.experiments.slos_serve import DRAFT_S, GPUS, setting
from simulation.studies.capacity import attainment_of, run_system
from simulation.studies.systems import NOISES

SCENARIOS = {"ChatBot": 15.0, "Summarizer": 9.7}  # and their rates per second
CASES = {  # by noise; ``ahead``: two iterations in flight, and 10 % of noise
    "noise10": {"Reasoning": 0.57},
    "noise20": {"Reasoning": 0.52, **SCENARIOS},
    "slow10": {"Reasoning": 0.455},
    "ahead": {"Reasoning": 0.4, **SCENARIOS},
}
PROGRAMS, SEEDS = 400, (1, 2, 3)
QUANTILES = (0.25, 0.5, 0.75, 1.0)
CHANCES = (0.0, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)  # bounds of groups of promises


def play(context: Context, scenario: str, rate: float, noise: str, seed: int) -> dict[str, Any]:
    """Promises of the judged requests of one run, kept ones by the chance that was told, and by how many seconds the
    first tokens of the broken ones were late."""
    profile, make = setting(context.traces, GPUS[0], scenario, PROGRAMS)
    system = replace(LIVE, straying=NOISES[noise], draft_s=DRAFT_S[GPUS[0]])
    simulation = run_system(system, profile, make(rate, seed), seed)
    jobs, records = simulation.jobs, simulation.records
    told = {int(decision.request_id): decision for decision in simulation.dispatcher.decisions}  # type: ignore[attr-defined]
    window = Window.of(jobs)
    judged = set(window.first_requests(jobs).tolist())  # programs have one round here
    promised = np.array([job in judged and told[job].verdict == Verdict.ADMITTED for job in range(len(jobs))])
    late_s = records["first_s"] - jobs["arrival_s"] - jobs["ttft_s"]
    broken = promised & records["missed"]
    at_first = late_s[broken & (late_s > 0.0)]
    chances = np.array([told[job].chance for job in np.flatnonzero(promised).tolist()])
    group = np.minimum(np.searchsorted(CHANCES, chances, side="right") - 1, len(CHANCES) - 2)
    sizes = [np.bincount(group[which], minlength=len(CHANCES) - 1) for which in (slice(None), ~broken[promised])]
    return {
        "scenario": scenario, "noise": noise, "rate": rate, "seed": seed,
        "asked": len(judged), "promised": int(promised.sum()), "broken": int(broken.sum()),
        "broken_at_first_token": len(at_first),
        "attained": round(attainment_of(simulation, window).worst_tier, 4),
        "by_chance": np.array(sizes).T.tolist(),
        "late_s": np.quantile(at_first, QUANTILES).round(3).tolist() if len(at_first) else [],
    }  # fmt: skip


def headline(points: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Over seeds: the share kept, that of asked that attained, and the latest first token, by scenario and noise."""
    figures = {}
    for case in dict.fromkeys((p["scenario"], p["noise"]) for p in points):
        own, name = [p for p in points if (p["scenario"], p["noise"]) == case], ", ".join(case)
        figures[f"{name}, kept"] = round(1.0 - sum(p["broken"] for p in own) / sum(p["promised"] for p in own), 4)
        figures[f"{name}, attained"] = round(float(np.mean([p["attained"] for p in own])), 4)
        figures[f"{name}, latest_s"] = max((p["late_s"][-1] for p in own if p["late_s"]), default=0.0)
    return figures


def main(
    traces: TracesOption = TRACES,
    json: Annotated[Path | None, typer.Option(help="Result file.")] = None,
) -> None:
    """Play every case, print and write."""
    context, points = context_of(traces), []
    for noise, cases in CASES.items():
        for (scenario, rate), seed in product(cases.items(), SEEDS):
            points.append(play(context, scenario, rate, noise, seed))
            print(points[-1], flush=True)
    print(figures := headline(points))
    if json is not None:
        config = {"cases": CASES, "programs": PROGRAMS, "quantiles": QUANTILES, "chances": CHANCES}
        write_result(json, "late_promises", config=config, seeds=SEEDS, headline=figures, points=points)


if __name__ == "__main__":
    typer.run(main)
