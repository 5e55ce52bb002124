"""The evaluation of PolyServe (section 5.2): goodput of 20 replicas on eight length distributions, and of 64."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mode
from typing import Any

import numpy as np

from profiles.profile import Profile
from profiles.store import load_profile
from simulation.experiments.fleet_tuning import (
    TuningOptions,
    fixed_apart,
    fixed_budget,
    planned,
    planned_apart,
    planned_tiers,
    shedding,
    silos,
)
from simulation.experiments.registry import Context, Experiment, Point, Task, markdown_table, register
from simulation.experiments.slos_serve_figures import geomean
from simulation.studies.capacity import median_and_spread
from simulation.studies.fleet_systems import FleetSystem, Goodput, planned_fleet, run_through
from simulation.studies.polyserve_bound import optimum_per_s
from simulation.workloads.lengths import read_published
from simulation.workloads.polyserve import TieredLoad

PROFILE = "h200_sxm__llama-3.1-8b"
DATA_SETS = (  # of table 1, those that are quick to simulate first
    "mooncake_toolagent",
    "mooncake_conversation",
    "mooncake_synthetic",
    "splitwise",
    "sharegpt",
    "uniform_4096_1024",
    "uniform_512_512",
    "lmsys",
)
SLOW = DATA_SETS[4:]  # hundreds of requests per replica
ON_SLOW = ("fixed-budget", "planner", "edf-shed", "fixed-apart", "planner-apart")  # measured on those too
TUNING_SEED = 1000
OPTIMUM_JOBS = 20_000
COLOCATED = {
    "fixed-budget": fixed_budget,
    "silos": silos,
    "edf-shed": shedding,
    "planner": planned,
    "planner-tiers": planned_tiers,
}
APART = {"fixed-apart": fixed_apart, "planner-apart": planned_apart}
SMALL_PER_S, SMALL_JOBS = 60.0, 300  # of the load by which a change of behaviour is noticed, on 4 replicas
SAMPLES = {
    "fixed-budget": FleetSystem("fixed-budget", "sarathi", "minimal_time", token_budget=512, replicas=4),
    "silos": FleetSystem("silos", "sarathi", "least_loaded", token_budget=512, split=(1, 1, 1, 1), replicas=4),
    "edf-shed": FleetSystem("edf-shed", "edf-shed", "minimal_time", replicas=4),
    "planner": planned_fleet(4),
    "planner-tiers": replace(planned_fleet(4), split=(1, 1, 1, 1)),
    "fixed-apart": FleetSystem(
        "fixed-apart", "vllm", "power_of_two", prefills=2, prefill_policy="vllm", prefill_budget=2048, replicas=4
    ),
    "planner-apart": planned_fleet(4, 2),
    "elastic": FleetSystem("elastic", "slo", "gradient", load_ceiling=0.8, replicas=4),
    "elastic-apart": FleetSystem(
        "elastic-apart", "slo", "gradient", prefills=2, load_ceiling=0.8, prefill_comfort=0.3, replicas=4
    ),
}
SETTINGS = ("lifetimes", "tuning_lifetimes", "requests", "budgets", "seeds", "tolerance")  # of every task
LARGER = ("fixed-budget", "silos", "planner")  # at the larger sizes
SIZED = ("fixed-budget", "planner")  # at the sizes of section 5.5
RIVALS = {"planner": ("fixed-budget",), "planner-apart": ("fixed-apart", "fixed-budget")}


def config(quick: bool) -> dict[str, Any]:
    systems = ["fixed-budget", "planner", "fixed-apart", "planner-apart", "edf-shed", "silos", "planner-tiers"]
    if quick:
        return {"data_sets": ["mooncake_toolagent"], "systems": systems, "replicas": [8], "larger_on": "",
                "sized_on": "", "sizes": [], "lifetimes": 1.5, "tuning_lifetimes": 1.0, "requests": 800,
                "budgets": [512, 2048], "seeds": [1], "tolerance": 2}  # fmt: skip
    return {"data_sets": list(DATA_SETS), "systems": systems, "replicas": [20, 64], "larger_on": "splitwise",
            "sized_on": "uniform_4096_1024", "sizes": [8, 64], "lifetimes": 4.0, "tuning_lifetimes": 1.5,
            "requests": 3000, "budgets": [256, 512, 1024, 2048, 4096], "seeds": [1, 2, 3], "tolerance": 1}  # fmt: skip


def tasks(config: dict[str, Any]) -> list[Task]:
    """One task per data set and system; larger fleets beside silos and one pool on one data set; sizes on another."""
    first, *larger = config["replicas"]
    wanted = [
        (name, system, first)
        for system in config["systems"]
        for name in config["data_sets"]
        if system in ON_SLOW or name not in SLOW
    ]
    wanted += [(config["larger_on"], system, size) for size in larger for system in LARGER]
    wanted += [(config["sized_on"], system, size) for size in config["sizes"] for system in SIZED]
    settings = {name: config[name] for name in SETTINGS}
    return [
        Task(f"{name}/{system}/{size}", {**settings, "data_set": name, "system": system, "replicas": size})
        for name, system, size in wanted
    ]


def load_of(context: Context, data_set: str) -> TieredLoad:
    """The workload of a data set."""
    lengths = read_published(Path(context.traces) / "lengths_published.json")["polyserve"][data_set]
    return TieredLoad(lengths["input"], lengths["output"])


def jobs_maker(
    load: TieredLoad, profile: Profile, lifetimes: float, least: int, seed: int
) -> Callable[[float], np.ndarray]:
    """Jobs by rate: as many as arrive in so many lifetimes of a request, and ``least`` of them."""

    def make(rate_per_s: float) -> np.ndarray:
        count = max(least, int(lifetimes * load.lifetime_s() * rate_per_s))
        return load.jobs(profile, rate_per_s, count, seed)

    return make


def run(params: Mapping[str, Any], context: Context) -> Point:
    return measure(params, load_of(context, params["data_set"]))


def measure(params: Mapping[str, Any], load: TieredLoad) -> Point:
    """Goodput of one system at its best setting under a load: every tier on every seed, overall on the first."""
    profile, replicas, least = load_profile(PROFILE), params["replicas"], params["requests"]
    jobs = load.jobs(profile, 1.0, OPTIMUM_JOBS, TUNING_SEED)
    optimum = optimum_per_s(jobs, profile, replicas, params["system"] in APART)
    # A decode side that is too small fills up for some lifetimes before it shows.
    lifetimes = params["lifetimes" if params["system"] in APART else "tuning_lifetimes"]
    make = jobs_maker(load, profile, lifetimes, least // 2, TUNING_SEED)
    tune = (COLOCATED | APART)[params["system"]]
    setting, system, start = tune(TuningOptions(profile, make, optimum), replicas, tuple(params["budgets"]))
    goodputs = [
        Goodput(system, profile, jobs_maker(load, profile, params["lifetimes"], least, seed), optimum)
        for seed in params["seeds"]
    ]
    figures: dict[str, Any] = {}
    for figure, of_seeds in (("worst_tier", goodputs), ("overall", goodputs[:1])):
        rates = []
        for goodput in of_seeds:
            start = goodput.search(figure, start, step=2, tolerance=params["tolerance"])
            rates.append(goodput.rate_per_s(start))
        figures[figure] = {**median_and_spread(rates), "seeds": rates}
    point = {name: params[name] for name in ("data_set", "system", "replicas")}
    return {**point, "setting": setting, "bound": optimum, "excluded": load.unattainable(profile), **figures}


def _by_place(points: Sequence[Point], replicas: int) -> dict[tuple[str, str], Point]:
    return {(p["data_set"], p["system"]): p for p in points if p["replicas"] == replicas}


def ratios(points: Mapping[tuple[str, str], Point], ours: str, theirs: Sequence[str]) -> list[float]:
    """Median goodput of ``ours`` over the best of ``theirs`` for every data set that has all of them."""
    found = []
    for data_set in dict.fromkeys(name for name, _ in points):
        rivals = [points[data_set, name]["worst_tier"]["median"] for name in theirs if (data_set, name) in points]
        if len(rivals) == len(theirs) and (data_set, ours) in points:
            found.append(points[data_set, ours]["worst_tier"]["median"] / max(rivals))
    return found


def headline(points: Sequence[Point]) -> dict[str, float]:
    """What is quoted; geometric means over data sets."""
    known = _by_place(points, mode(p["replicas"] for p in points) if points else 0)
    colocated, apart = (ratios(known, name, rivals) for name, rivals in RIVALS.items())
    shed = ratios(known, "planner", ("edf-shed",))

    def of_bound(system: str) -> float:
        shares = [p["worst_tier"]["median"] / p["bound"] for (_, name), p in known.items() if name == system]
        return geomean(shares)

    figures = {
        "goodput_ratio_colocated": geomean(colocated),
        "goodput_ratio_disaggregated": geomean(apart),
        "goodput_ratio_min": min([*colocated, *apart], default=float("nan")),
        "ratio_vs_shed_geomean": geomean(shed),
        "ratio_vs_shed_min": min(shed, default=float("nan")),
        "of_bound_colocated": of_bound("planner"),
        "of_bound_disaggregated": of_bound("planner-apart"),
    }
    for replicas in sorted({p["replicas"] for p in points}):
        own = _by_place(points, replicas)
        figures[f"ratio_vs_silos_and_pool_min_{replicas}"] = min(
            ratios(own, "planner", ("silos", "fixed-budget")), default=float("nan")
        )
    return {name: round(value, 4) for name, value in figures.items() if np.isfinite(value)}


def tables(points: Sequence[Point]) -> str:
    """Goodput per fleet size, data set and system; then what was left out of the data sets."""
    parts = []
    for replicas in sorted({p["replicas"] for p in points}):
        rows: list[list[object]] = []
        for p in (p for p in points if p["replicas"] == replicas):
            tier = p["worst_tier"]
            spread = f"{tier['low']:.3g} to {tier['high']:.3g}"
            share = tier["median"] / p["bound"]
            overall = p["overall"]["median"]
            each = tier["median"] / replicas
            rows.append(
                [p["data_set"], p["system"], p["setting"], tier["median"], spread, each, overall, p["bound"], share]
            )
        header = (
            "lengths",
            "system",
            "setting",
            "req/s, every tier",
            "over seeds",
            "per replica",
            "overall",
            "bound",
            "of the bound",
        )
        parts.append(f"### {replicas} replicas\n\n{markdown_table(header, rows)}")
    excluded = {p["data_set"]: p["excluded"] for p in points}
    rows = [[name, f"{share:.1%}"] for name, share in excluded.items() if share > 0]
    if rows:
        parts.append(
            "### Left out: no idle replica could serve them in time\n\n" + markdown_table(("lengths", "share"), rows)
        )
    return "\n\n".join(parts)


def behaviour_of(context: Context, data_set: str, systems: Sequence[str]) -> str:
    """Digest of what fleets do with a small fixed load, more than they can serve."""
    profile, load = load_profile(PROFILE), load_of(context, data_set)
    jobs = load.jobs(profile, SMALL_PER_S, SMALL_JOBS, TUNING_SEED)
    runs = [run_through(SAMPLES[system].run(profile, jobs)) for system in systems]
    return "".join(hashlib.blake2b(run.records.tobytes(), digest_size=8).hexdigest() for run in runs)


def behaviour(params: Mapping[str, Any], context: Context) -> str:
    return behaviour_of(context, params["data_set"], (params["system"],))


POLYSERVE = register(
    Experiment(
        "polyserve",
        "Goodput of a fleet with four TPOT tiers (PolyServe)",
        config,
        tasks,
        run,
        headline,
        tables,
        behaviour,
    )
)
