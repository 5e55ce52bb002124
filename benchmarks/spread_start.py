"""What a profile's spread is worth before anything was measured: the first promises kept with it and without it.

``python -m benchmarks.spread_start [--json OUT]``. The live controller's ``Fleet`` decides in virtual time over
modelled engines that stray from their profile by a planted spread, from the first request on. Engines' planners and the
controller's forecasts begin from nothing, or from the spread. Arrivals and noise are the same for both.
"""

import statistics
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

from benchmarks.result_file import write_result
from benchmarks.retry import MAX_RUNNING, SCENE, attained, requests
from controller.options import FleetOptions
from controller.scaling.tiers import Tier, TierTable
from profiles.spread import IterationSpread, spread_of
from simulation.core.loop import Simulation
from simulation.core.straying import learn_from, stray_by
from simulation.dispatchers.live_fleet import ControllerDispatcher
from simulation.studies.systems import System

FIRST, SEEDS = 200, tuple(range(1, 5))
REPLICAS, RATE_PER_S, SECONDS = 4, 70.0, 12.0
SAMPLES = 20_000


class Machine(NamedTuple):
    """How its iterations differ from the profile: log-normal noise, and a share of stalls that take longer still."""

    sigma: float
    stalls: float = 0.0
    stall_times: float = 1.0

    def spread(self) -> IterationSpread:
        """As a measurement of it would find."""
        random = np.random.default_rng(0)
        ratios = np.exp(self.sigma * random.standard_normal(SAMPLES))
        ratios[random.random(SAMPLES) < self.stalls] *= self.stall_times
        return spread_of(ratios, np.ones(SAMPLES), np.arange(SAMPLES) % 2 == 0)


MACHINES = {
    "noise20": Machine(0.2),
    "pauses": Machine(0.1, 0.03, 2.0),
    "stalls": Machine(0.05, 0.03, 4.0),
}
STARTS = ("nothing", "spread")


def run(machine: Machine, start: str, seed: int) -> dict[str, Any]:
    """The first promises of one run, the rest of them, and what was attained in all."""
    profile, spread = SCENE.load_profile(), machine.spread()
    known = replace(profile, spread=spread if start == "spread" else None)
    jobs = requests(RATE_PER_S, SECONDS, seed)
    engines = System("spread", max_running=MAX_RUNNING, replicas=REPLICAS).engines(profile, seed)
    stray_by(engines, spread)
    learn_from(engines, np.array(profile.coefficients), known.spread)
    dispatch = ControllerDispatcher(known, _tiers(jobs), FleetOptions(seed=seed))
    simulation = Simulation(jobs, engines, dispatch)
    simulation.run()
    promised, met = simulation.records["promised"], attained(simulation)
    first = np.flatnonzero(promised)[:FIRST]
    later = np.flatnonzero(promised)[FIRST:]
    return {
        "kept_first": float(met[first].mean()),
        "kept_later": float(met[later].mean()),
        "promised": int(promised.sum()),
        "attained": int(met.sum()),
        "of_first": int(first[-1]) + 1,
        "margins": {name: round(margin, 3) for name, margin in dispatch.fleet.calibration.margins.items()},
    }


def _tiers(jobs: np.ndarray) -> TierTable:
    output_tokens = int(jobs["output_tokens"].mean())
    told: dict[str, Any] = dict(unattainable="refuse", output_tokens=output_tokens)
    return TierTable.of(1, [Tier(f"tier {i}", c.ttft_s, c.tpot_s, **told) for i, c in enumerate(SCENE.classes)])


def main(
    json: Annotated[Path | None, typer.Option(help="Result file.")] = None,
    seeds: Annotated[list[int] | None, typer.Option("--seed")] = None,
    machines: Annotated[list[str] | None, typer.Option("--machine")] = None,
) -> None:
    """Run every machine from every start with every seed, print and write."""
    points, chosen = list[dict[str, Any]](), tuple(seeds or SEEDS)
    headline: dict[str, float] = {}
    for name in machines or MACHINES:
        by_start: dict[str, list[dict[str, Any]]] = {start: [] for start in STARTS}
        for seed in chosen:
            for start in STARTS:
                by_start[start].append(run(MACHINES[name], start, seed))
                points.append({"machine": name, "start": start, "seed": seed, **by_start[start][-1]})
        for start, found in by_start.items():
            means = {key: statistics.mean(p[key] for p in found) for key in found[0] if key != "margins"}
            least = min(p["kept_first"] for p in found)
            print(f"{name:8} {start:8}", {k: round(v, 4) for k, v in means.items()}, f"least {least:.3f}", flush=True)
            headline |= {f"{name}_{start}_{key}": value for key, value in means.items()}
        pairs = zip(by_start["spread"], by_start["nothing"], strict=True)
        gains = [mine["kept_first"] - none["kept_first"] for mine, none in pairs]
        print(f"{name:8} first {FIRST} kept, spread less nothing, by seed:", [round(gain, 3) for gain in gains])
    if json:
        config = {"replicas": REPLICAS, "rate_per_s": RATE_PER_S, "seconds": SECONDS, "first": FIRST}
        write_result(json, "spread_start", config=config, seeds=chosen, headline=headline, points=points)


if __name__ == "__main__":
    typer.run(main)
