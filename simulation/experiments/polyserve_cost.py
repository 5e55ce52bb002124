"""PolyServe sections 5.4 and 5.5: replica-seconds per attained request over rates, when there are replicas enough.

The load gradient keeps the replicas that it does not need empty, and an empty one costs nothing: it is back in the pool
at once (section 4.3). A static fleet is paid for all the time, and is as large as the target needs at that rate.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from profiles.profile import Profile
from profiles.store import load_profile
from simulation.capacity import median_and_spread
from simulation.experiments.fleet_tuning import Tuning, fixed_budget
from simulation.experiments.polyserve import (
    OPTIMUM_JOBS,
    PROFILE,
    TUNING_SEED,
    behaviour_of,
    jobs_maker,
    load_of,
)
from simulation.experiments.registry import Context, Experiment, Point, Task, markdown_table, register
from simulation.fleet_run import Run, advance_run, enlarge_if_full
from simulation.fleet_systems import (
    TARGET,
    WARM_UP,
    FleetSystem,
    Hopeless,
    attainment,
    run_through,
)
from simulation.metrics import Window, attained
from simulation.tiered import TPOT_S, TieredLoad, optimum_per_s

DATA_SET = "splitwise"
SPARE = 2.0  # replicas there are, in terms of those that the optimum would take
LOOK_S = 0.1  # of virtual time, between counts of the replicas in use
MANY = 1 << 40  # arrivals between two of those
COMFORTS = (0.95, 0.9, 0.85, 0.8, 0.7, 0.6)


def config(quick: bool) -> dict[str, Any]:
    if quick:
        return {"sizes": [4], "lifetimes": 1.5, "tuning_lifetimes": 1.0, "requests": 800, "budgets": [512, 1024],
                "comforts": [0.8], "seeds": [1]}  # fmt: skip
    return {"sizes": [4, 8, 16, 32], "lifetimes": 4.0, "tuning_lifetimes": 2.0, "requests": 2000,
            "budgets": [256, 512, 1024, 2048], "comforts": list(COMFORTS), "seeds": [1, 2, 3]}  # fmt: skip


def tasks(config: dict[str, Any]) -> list[Task]:
    """One task per rate, told by the replicas that the optimum would take."""
    return [Task(f"{DATA_SET}/{size}", {**config, "size": size}) for size in config["sizes"]]


def run(params: Mapping[str, Any], context: Context) -> Point:
    """Cost of both fleets at one rate; settings are found on a seed of their own."""
    profile, load, size = load_profile(PROFILE), load_of(context, DATA_SET), params["size"]
    rate_per_s = TARGET * optimum_per_s(load.jobs(profile, 1.0, OPTIMUM_JOBS, TUNING_SEED), profile, size, False)
    tuning_jobs = jobs_maker(load, profile, params["tuning_lifetimes"], params["requests"] // 2, TUNING_SEED)(
        rate_per_s
    )
    elastic = _comfortable(elastic_fleet(math.ceil(SPARE * size)), profile, tuning_jobs, params["comforts"])
    setting, static = _best_static(params, profile, load, rate_per_s)
    figures: dict[str, list[float]] = {"elastic": [], "static": [], "replicas": [], "used": []}
    for seed in params["seeds"]:
        jobs = jobs_maker(load, profile, params["lifetimes"], params["requests"], seed)(rate_per_s)
        replicas = fewest(static, profile, jobs, size)
        used, attained_per_s, _worst = usage(elastic.run(profile, jobs))
        _all, static_per_s, _worst = usage(replace(static, replicas=replicas).run(profile, jobs))
        figures["elastic"].append(used / attained_per_s)
        figures["static"].append(replicas / static_per_s)
        figures["replicas"].append(replicas)
        figures["used"].append(used)
    found = {name: {**median_and_spread(values), "seeds": values} for name, values in figures.items()}
    return {"size": size, "rate_per_s": rate_per_s, "comfort": elastic.comfort, "budget": setting, **found}


def elastic_fleet(replicas: int) -> FleetSystem:
    """The load gradient over more replicas than are needed."""
    return FleetSystem("elastic", "slo", "gradient", replicas=replicas)


def _comfortable(system: FleetSystem, profile: Profile, jobs: np.ndarray, comforts: Sequence[float]) -> FleetSystem:
    """The gradient at the highest load per replica with which every tier attains the target on the tuning seed."""
    for comfort in comforts:
        chosen = replace(system, comfort=comfort)
        run = chosen.run(profile, jobs)
        if attainment(run_through(run, Hopeless(run, "worst_tier"))).worst_tier >= TARGET:
            return chosen
    return chosen


def _best_static(
    params: Mapping[str, Any], profile: Profile, load: TieredLoad, rate_per_s: float
) -> tuple[str, FleetSystem]:
    """The fixed budget and balancer with the highest goodput of a fleet of this size."""
    size = params["size"]
    make = jobs_maker(load, profile, params["tuning_lifetimes"], params["requests"] // 2, TUNING_SEED)
    setting, system, _ = fixed_budget(Tuning(profile, make, rate_per_s / TARGET), size, tuple(params["budgets"]))
    return setting, system


def fewest(system: FleetSystem, profile: Profile, jobs: np.ndarray, start: int) -> int:
    """Fewest replicas with which every tier attains the target: grows from ``start`` until enough, then bisects."""

    def is_enough(replicas: int) -> bool:
        run = replace(system, replicas=replicas).run(profile, jobs)
        return attainment(run_through(run, Hopeless(run, "worst_tier"))).worst_tier >= TARGET

    low, high = 0, start
    while not is_enough(high):
        low, high = high, high + max(1, high // 4)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def usage(run: Run) -> tuple[float, float, float]:
    """Mean replicas in use and attained requests per second over the judged time, and the worst tier's attainment."""
    window, counts = Window.of(run.jobs, WARM_UP), []
    while True:
        run = enlarge_if_full(run)
        if not advance_run(run, run.fleet.state[0]["now_s"] + LOOK_S, len(TPOT_S), MANY):
            break
        if window.start_s <= run.fleet.state[0]["now_s"] <= window.end_s:
            counts.append(int((run.engines.state["count"] > 0).sum()))
    heads = window.heads(run.jobs)
    met = attained(run.jobs, run.records)["dslo"][heads].sum()
    return float(np.mean(counts)), float(met / (window.end_s - window.start_s)), attainment(run).worst_tier


def headline(points: Sequence[Point]) -> dict[str, float]:
    """Cost of the elastic fleet over that of the static one, worst and mean over rates."""
    ratios = [p["elastic"]["median"] / p["static"]["median"] for p in points]
    return {"cost_ratio_worst_rate": round(max(ratios), 4), "cost_ratio_mean": round(float(np.mean(ratios)), 4)}


def tables(points: Sequence[Point]) -> str:
    rows = [
        [
            p["rate_per_s"],
            p["used"]["median"],
            int(p["replicas"]["median"]),
            1e3 * p["elastic"]["median"],
            1e3 * p["static"]["median"],
            p["elastic"]["median"] / p["static"]["median"],
            p["comfort"],
            p["budget"],
        ]
        for p in points
    ]
    header = ("req/s", "replicas used", "static replicas", "replica-ms per attained request", "static", "ratio")
    return markdown_table((*header, "comfortable load", "static setting"), rows)


POLYSERVE_COST = register(
    Experiment(
        "polyserve-cost",
        "Cost per request with replicas enough",
        config,
        tasks,
        run,
        headline,
        tables,
        lambda params, context: behaviour_of(context, DATA_SET, ("elastic", "fixed-budget")),
    )
)
