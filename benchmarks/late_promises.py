"""How late the first tokens of broken promises come under steady overload, in virtual time.

``python -m benchmarks.late_promises --json OUT``. One simulated A100 under the live controller's ``Fleet`` in
SLOs-Serve's scenarios of programs with one round, at about 1.5 times their capacity, on engines that stray.
"""

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
from simulation.experiments.registry import Context
from simulation.experiments.slos_serve import DRAFT_S, GPUS, setting
from simulation.studies.capacity import run_system
from simulation.studies.systems import NOISES

CASES = (("Reasoning", 0.52), ("ChatBot", 15.0), ("Summarizer", 9.7))  # scenario, rate per second
NOISES_PLAYED = ("noise20", "ahead")  # the second: two iterations in flight, and 10 % of noise
PROGRAMS, SEED = 400, 1
QUANTILES = (0.25, 0.5, 0.75, 1.0)


def play(context: Context, scenario: str, rate: float, noise: str) -> dict[str, Any]:
    """Promises of one run, and by how many seconds the first tokens of the broken ones were late."""
    profile, make = setting(context.traces, GPUS[0], scenario, PROGRAMS)
    system = replace(LIVE, straying=NOISES[noise], draft_s=DRAFT_S[GPUS[0]])
    simulation = run_system(system, profile, make(rate, SEED), SEED)
    jobs, records = simulation.jobs, simulation.records
    told = {int(decision.request_id): decision.verdict for decision in simulation.dispatcher.decisions}  # type: ignore[attr-defined]
    promised = np.array([told.get(job) == Verdict.ADMITTED for job in range(len(jobs))])
    late_s = records["first_s"] - jobs["arrival_s"] - jobs["ttft_s"]
    broken = promised & records["missed"]
    at_first = late_s[broken & (late_s > 0.0)]
    return {
        "scenario": scenario, "noise": noise, "rate": rate, "seed": SEED,
        "promised": int(promised.sum()), "broken": int(broken.sum()), "broken_at_first_token": len(at_first),
        "late_s": np.quantile(at_first, QUANTILES).round(3).tolist() if len(at_first) else [],
    }  # fmt: skip


def main(
    traces: TracesOption = TRACES,
    json: Annotated[Path | None, typer.Option(help="Result file.")] = None,
) -> None:
    """Play every case, print and write."""
    context, points = context_of(traces), []
    for noise, (scenario, rate) in product(NOISES_PLAYED, CASES):
        points.append(play(context, scenario, rate, noise))
        print(points[-1], flush=True)
    if json is not None:
        headline = {f"{p['scenario']}, {p['noise']}, latest_s": p["late_s"][-1] if p["late_s"] else 0.0 for p in points}
        config = {"cases": CASES, "programs": PROGRAMS, "quantiles": QUANTILES}
        write_result(json, "late_promises", config=config, seeds=(SEED,), headline=headline, points=points)


if __name__ == "__main__":
    typer.run(main)
