"""The evaluation of PolyServe (section 5.2): goodput of 20 replicas on eight length distributions, and of 64."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from profiles.profile import Profile
from profiles.store import load_profile
from simulation.core.metrics import Window
from simulation.experiments.fleet_tuning import (
    BEST_KNOWN,
    TuningOptions,
    fixed_apart,
    fixed_budget,
    planned,
    planned_apart,
    planned_tiers,
    shedding,
    silos,
)
from simulation.experiments.polyserve_figures import headline, tables
from simulation.experiments.registry import Context, Experiment, Point, Task, register
from simulation.experiments.tuning import MARGINS
from simulation.studies.capacity import median_and_spread
from simulation.studies.fleet_systems import WARM_UP, FleetSystem, Goodput, planned_fleet, run_through
from simulation.studies.polyserve_bound import optimum_per_s
from simulation.studies.promised import OVERLOAD, tally
from simulation.studies.systems import NOISES
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
RIVALS = ("fixed-budget", "silos", "edf-shed", "fixed-apart")
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
STRAYING = ("noise10", "noise20", "slow10")


def config(quick: bool) -> dict[str, Any]:
    systems = ["fixed-budget", "planner", "fixed-apart", "planner-apart", "edf-shed", "silos", "planner-tiers"]
    if quick:
        return {"data_sets": ["mooncake_toolagent"], "systems": systems, "replicas": [8], "larger_on": "",
                "sized_on": "", "sizes": [], "lifetimes": 1.5, "tuning_lifetimes": 1.0, "requests": 800,
                "budgets": [512, 2048], "seeds": [1], "tolerance": 2,
                "noises": list(STRAYING), "noise_on": ["mooncake_toolagent"]}  # fmt: skip
    return {"data_sets": list(DATA_SETS), "systems": systems, "replicas": [20, 64], "larger_on": "splitwise",
            "sized_on": "uniform_4096_1024", "sizes": [8, 64], "lifetimes": 4.0, "tuning_lifetimes": 1.5,
            "requests": 3000, "budgets": [256, 512, 1024, 2048, 4096], "seeds": [1, 2, 3], "tolerance": 1,
            "noises": list(STRAYING), "noise_on": list(DATA_SETS[:4])}  # fmt: skip


def tasks(config: dict[str, Any]) -> list[Task]:
    """One task per data set and system; larger fleets beside silos and one pool on one data set; sizes on another; and
    some data sets once more on engines that stray."""
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
    found = [
        Task(f"{name}/{system}/{size}", {**settings, **_told(system), "data_set": name, "replicas": size})
        for name, system, size in wanted
    ]
    straying = [(noise, name) for noise in config["noises"] for name in config["noise_on"]]
    for noise, name in straying:
        for system in (system for system in config["systems"] if system in ON_SLOW):
            own = {**settings, **_told(system), "data_set": name, "replicas": first, "noise": noise}
            found.append(Task(f"{noise}/{name}/{system}/{first}", own))
    return found


def _told(system: str) -> dict[str, Any]:
    """The system, and its own settings that are tuned: other choices make another task."""
    own: dict[str, Any] = {"margins": list(MARGINS)} if system == "edf-shed" else {}
    return {"system": system, **own, **({"balancers": list(BEST_KNOWN)} if system in RIVALS else {})}


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
    tune, straying = (COLOCATED | APART)[params["system"]], NOISES[params.get("noise", "exact")]
    setting, system, start = tune(TuningOptions(profile, make, optimum, straying), replicas, tuple(params["budgets"]))
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
    point = {name: params[name] for name in ("data_set", "system", "replicas", "noise") if name in params}
    if "noise" in params and "promised" in setting:
        figures |= _promises(goodputs, figures["worst_tier"]["seeds"])
    return {**point, "setting": setting, "bound": optimum, "excluded": load.unattainable(profile), **figures}


def _promises(goodputs: Sequence[Goodput], rates_per_s: Sequence[float]) -> dict[str, list[int]]:
    """Promises made and kept, summed over seeds, at the goodput of each and at ``OVERLOAD`` times it."""
    found = {}
    for name, factor in (("at_capacity", 1.0), ("overload", OVERLOAD)):
        counts = []
        for goodput, rate_per_s in zip(goodputs, rates_per_s, strict=True):
            run = run_through(goodput.system.run(goodput.profile, goodput.make_jobs(factor * rate_per_s)))
            counts.append(tally(run.jobs, run.records, Window.of(run.jobs, WARM_UP)))
        found[name] = [sum(count) for count in zip(*counts, strict=True)]
    return found


def behaviour_of(context: Context, data_set: str, systems: Sequence[str], noise: str = "exact") -> str:
    """Digest of what fleets do with a small fixed load, more than they can serve."""
    profile, load = load_profile(PROFILE), load_of(context, data_set)
    jobs = load.jobs(profile, SMALL_PER_S, SMALL_JOBS, TUNING_SEED)
    fleets = [replace(SAMPLES[system], straying=NOISES[noise]) for system in systems]
    runs = [run_through(fleet.run(profile, jobs)) for fleet in fleets]
    return "".join(hashlib.blake2b(run.records.tobytes(), digest_size=8).hexdigest() for run in runs)


def behaviour(params: Mapping[str, Any], context: Context) -> str:
    return behaviour_of(context, params["data_set"], (params["system"],), params.get("noise", "exact"))


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
