"""What the search for a set is worth in the live fleet: value attained with it, over simpler choices, in bursts.

Requests are worth 1, 3 or 10, drawn by lot, whatever else they ask for (``value`` of their tiers). The fleet chooses
among those that have not begun by the DP and its search (SLOs-Serve section 3.2.1), by value per work, or lets whoever
came first keep the place (``controller.options.FleetOptions.selection``). Engines stray.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from controller.options import ARRIVAL, DP, GREEDY
from profiles.profile import Profile
from profiles.store import load_profile
from simulation.core.metrics import Window, attained
from simulation.experiments.behaviour import behaviour
from simulation.experiments.registry import Context, Experiment, Point, Task, markdown_table, register
from simulation.experiments.slos_serve_figures import geomean
from simulation.studies.bound import fluid_bound_per_s
from simulation.studies.capacity import MakeJobs, run_system
from simulation.studies.promised import tally
from simulation.studies.systems import NOISES, FleetOf, engine_model
from simulation.workloads.scenarios import CODE, CONV, make_scenario
from simulation.workloads.traces import read_trace

GPU = "a100_sxm__llama-3.1-8b"
VALUES, SHARES = (1.0, 3.0, 10.0), (0.6, 0.3, 0.1)  # of the requests
SELECTIONS = (DP, GREEDY, ARRIVAL)
REPLICAS = 2


def config(quick: bool) -> dict[str, Any]:
    """Loads are in multiples of the fluid bound, which knows neither bursts nor latency."""
    if quick:
        return {"scenarios": ["Coder"], "loads": [1.0], "noise": "noise10", "programs": 200, "seeds": [1, 2]}
    return {"scenarios": ["Coder", "Mixed"], "loads": [0.5, 1.0, 1.5], "noise": "noise10", "programs": 500,
            "seeds": [1, 2, 3, 4]}  # fmt: skip


def tasks(config: dict[str, Any]) -> list[Task]:
    """One task per scenario, load and way to choose."""
    common = {name: config[name] for name in ("noise", "programs", "seeds")}
    return [
        Task(f"{scenario}/{load:g}/{selection}", {**common, "scenario": scenario, "load": load, "selection": selection})
        for scenario in config["scenarios"]
        for load in config["loads"]
        for selection in SELECTIONS
    ]


@lru_cache(maxsize=16)
def _setting(traces: Path, scenario: str, programs: int) -> tuple[Profile, MakeJobs]:
    """Hardware, and the scenario's jobs with a value each by rate and seed."""
    arrivals = {name: read_trace(traces / f"{name}.parquet").arrival_s for name in (CONV, CODE)}
    profile = load_profile(GPU)

    def make(rate_per_s: float, seed: int) -> np.ndarray:
        return valued(make_scenario(scenario, arrivals, profile.coefficients, rate_per_s, programs, seed), seed)

    return profile, make


def valued(jobs: np.ndarray, seed: int) -> np.ndarray:
    """The jobs with a value per program, and a tier per value and tier of before."""
    jobs = jobs.copy()
    drawn = np.random.default_rng(seed).choice(len(VALUES), size=len(jobs), p=SHARES)[jobs["program"]]
    jobs["value"] = np.array(VALUES)[drawn]
    jobs["tier"] = jobs["tier"] * len(VALUES) + drawn
    return jobs


def _system(params: Mapping[str, Any]) -> FleetOf:
    system = FleetOf("live", admits=True, replicas=REPLICAS, routing="marginal_load", max_hops=4)
    return replace(system, selection=params["selection"], straying=NOISES[params["noise"]])


def run(params: Mapping[str, Any], context: Context) -> Point:
    """Share of the value asked for that was attained, per seed; and the promises of all seeds."""
    profile, make = _setting(context.traces, params["scenario"], params["programs"])
    shares, counts = [], []
    for seed in params["seeds"]:
        bound = fluid_bound_per_s(make(1.0, seed), engine_model(profile))
        jobs = make(REPLICAS * params["load"] * bound, seed)
        simulation = run_system(_system(params), profile, jobs, seed)
        window = Window.of(jobs)
        heads = window.first_requests(jobs)
        met, value = attained(simulation.jobs, simulation.records)["dslo"][heads], jobs["value"][heads]
        shares.append(float(value[met].sum() / max(1.0, value.sum())))  # no value is below 1
        counts.append(tally(simulation.jobs, simulation.records, window))
    point = {name: params[name] for name in ("scenario", "load", "selection")}
    return {**point, "value_share": shares, "promises": [sum(count) for count in zip(*counts, strict=True)]}


def behaves(params: Mapping[str, Any], context: Context) -> str:
    """What the fleet decides now."""
    return behaviour(_system(params), *_setting(context.traces, params["scenario"], params["programs"]))


def headline(points: Sequence[Point]) -> dict[str, float]:
    """Value attained over that of the simpler choices: geometric means over scenarios, loads and seeds."""
    shares = {(p["scenario"], p["load"], p["selection"]): p["value_share"] for p in points}
    figures: dict[str, float] = {}
    for name, rival in (("dp_value_gain", GREEDY), ("dp_value_gain_over_arrival", ARRIVAL)):
        gains = [
            own / other
            for (scenario, load, selection), mine in shares.items()
            if selection == DP and (scenario, load, rival) in shares
            for own, other in zip(mine, shares[scenario, load, rival], strict=True)
            if other > 0
        ]
        if gains:
            figures |= {name: round(geomean(gains), 4), f"{name}_min": round(min(gains), 4)}
    made = [p["promises"] for p in points if p["selection"] == DP]
    if any(promised for _asked, promised, _kept in made):
        figures["kept_min"] = round(min(kept / promised for _asked, promised, kept in made if promised), 4)
    return figures


def tables(points: Sequence[Point]) -> str:
    """One row per scenario and load."""
    rows: list[list[object]] = []
    for scenario, load in dict.fromkeys((p["scenario"], p["load"]) for p in points):
        own = {p["selection"]: p["value_share"] for p in points if (p["scenario"], p["load"]) == (scenario, load)}
        rows.append([scenario, load, *(_spread(own[name]) if name in own else "not run" for name in SELECTIONS)])
    return markdown_table(("scenario", "load", *(f"value attained, {name}" for name in SELECTIONS)), rows)


def _spread(shares: Sequence[float]) -> str:
    return f"{np.median(shares):.3f} ({min(shares):.3f} to {max(shares):.3f})"


DP_VALUE = register(
    Experiment("dp-value", "What the search for a set is worth", config, tasks, run, headline, tables, behaves)
)
