"""PolyServe section 5.4: replica-seconds per attained request over rates, when there are replicas enough.

The load gradient keeps the replicas that it does not need empty, and an empty one costs nothing once it is back in the
pool (section 4.3). A static fleet is paid for all the time, and is as large as the target needs at that rate. Both
co-located and with prompts and decodes apart.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from controller.scaling.roles import RoleOptions
from profiles.profile import Profile
from profiles.store import load_profile
from simulation.core.metrics import Window, attained
from simulation.dispatchers.fleet_run import Run, advance_run, enlarge_if_full
from simulation.experiments.fleet_tuning import TuningOptions, fixed_apart, fixed_budget, prefills_of
from simulation.experiments.polyserve import (
    OPTIMUM_JOBS,
    PROFILE,
    TUNING_SEED,
    behaviour_of,
    jobs_maker,
    load_of,
)
from simulation.experiments.registry import Context, Experiment, Point, Task, markdown_table, register
from simulation.studies.capacity import median_and_spread
from simulation.studies.fleet_systems import (
    TARGET,
    WARM_UP,
    EarlyStop,
    FleetSystem,
    attainment,
    run_through,
)
from simulation.studies.polyserve_bound import optimum_per_s
from simulation.workloads.polyserve import TPOT_S

DATA_SET = "splitwise"
MODES = {"": ("elastic", "fixed-budget"), "-apart": ("elastic-apart", "fixed-apart")}  # what is compared, by key
SPARE = 2.0  # replicas there are, in terms of those that the optimum would take
LINGER_S = RoleOptions().idle_s  # a replica is paid for so long after its last request
LOOK_S = 0.1  # of virtual time, between counts of the replicas in use
MANY = 1 << 40  # arrivals between two of those
COMFORTS = (8.0, 4.0, 2.0, 1.3, 0.95, 0.8, 0.6)
PREFILL_COMFORTS = (0.3, 0.6, 0.9, 1.2, 1.6, 2.0)
SAFE = 0.02  # more than the target on the tuning seed, so that other seeds reach it


def config(quick: bool) -> dict[str, Any]:
    if quick:
        return {"modes": list(MODES), "sizes": [4], "lifetimes": 1.5, "tuning_lifetimes": 1.0, "requests": 800,
                "budgets": [512, 1024], "comforts": [0.8], "prefill_comforts": [0.3], "seeds": [1]}  # fmt: skip
    return {"modes": list(MODES), "sizes": [4, 8, 16, 32], "lifetimes": 4.0, "tuning_lifetimes": 2.0,
            "requests": 2000, "budgets": [256, 512, 1024, 2048], "comforts": list(COMFORTS),
            "prefill_comforts": list(PREFILL_COMFORTS), "seeds": [1, 2, 3]}  # fmt: skip


def tasks(config: dict[str, Any]) -> list[Task]:
    """One task per mode and rate, told by the replicas that the optimum would take."""
    settings = {name: value for name, value in config.items() if name not in ("modes", "sizes")}
    return [
        Task(f"{DATA_SET}{mode}/{size}", {**settings, "mode": mode, "size": size})
        for mode in config["modes"]
        for size in config["sizes"]
    ]


def run(params: Mapping[str, Any], context: Context) -> Point:
    """Cost of both fleets at one rate; settings are found on a seed of their own."""
    profile, load, is_apart = load_profile(PROFILE), load_of(context, DATA_SET), bool(params["mode"])
    optimum = optimum_per_s(load.jobs(profile, 1.0, OPTIMUM_JOBS, TUNING_SEED), profile, params["size"], is_apart)
    make = jobs_maker(load, profile, params["tuning_lifetimes"], params["requests"] // 2, TUNING_SEED)
    tuning = TuningOptions(profile, make, optimum)
    elastic = cheapest(tuning, elastic_fleets(tuning, params))
    choose = fixed_apart if is_apart else fixed_budget
    setting, static, _ = choose(tuning, params["size"], tuple(params["budgets"]))
    figures: dict[str, list[float]] = {n: [] for n in ("elastic", "static", "replicas", "used", "worst_tier")}
    for seed in params["seeds"]:
        jobs = jobs_maker(load, profile, params["lifetimes"], params["requests"], seed)(TARGET * optimum)
        fewest = fewest_static(static, profile, jobs, params["size"])
        used, paid = usage(elastic.run(profile, jobs)), usage(fewest.run(profile, jobs))
        figures["elastic"].append(used.replicas / used.attained_per_s)
        figures["static"].append(fewest.replicas / paid.attained_per_s)
        figures["replicas"].append(fewest.replicas)
        figures["used"].append(used.replicas)
        figures["worst_tier"].append(used.worst_tier)
    found = {name: {**median_and_spread(values), "seeds": values} for name, values in figures.items()}
    place = {"mode": params["mode"], "size": params["size"], "rate_per_s": TARGET * optimum, "budget": setting}
    return {**place, "comfort": elastic.load_ceiling, "prefill_comfort": elastic.prefill_comfort, **found}


def elastic_fleets(tuning: TuningOptions, params: Mapping[str, Any]) -> Iterator[FleetSystem]:
    """The load gradient over more replicas than are needed, at every comfortable load that is tried."""
    replicas = math.ceil(SPARE * params["size"])
    base = FleetSystem("elastic", "slo", "gradient", replicas=replicas)
    if params["mode"]:
        base = replace(base, prefills=prefills_of(tuning, replicas)[0], prefill_budget=4096)
    for load_ceiling in params["comforts"]:
        for prefill_comfort in params["prefill_comforts"] if params["mode"] else (0.0,):
            yield replace(base, load_ceiling=load_ceiling, prefill_comfort=prefill_comfort)


def cheapest(tuning: TuningOptions, fleets: Iterator[FleetSystem]) -> FleetSystem:
    """The fleet of least cost that keeps every tier safely at the target on the tuning seed; else the best of them."""
    jobs = tuning.make_jobs(TARGET * tuning.optimum_per_s)
    found = list[tuple[float, float, int, FleetSystem]]()
    for fleet in fleets:
        seen = usage(fleet.run(tuning.profile, jobs))
        lacks = max(0.0, TARGET + SAFE - seen.worst_tier)
        found.append((lacks, seen.replicas / seen.attained_per_s, len(found), fleet))
    return min(found)[-1]


def fewest_static(system: FleetSystem, profile: Profile, jobs: np.ndarray, start: int) -> FleetSystem:
    """The smallest fleet like ``system`` with which every tier attains the target; grows from ``start``, then bisects.

    Apart, the prefill side keeps its part of the replicas, rounded to whichever of both sides is enough.
    """

    def enough(replicas: int) -> FleetSystem | None:
        exact = system.prefills * replicas / system.replicas
        for prefills in sorted({math.floor(exact), math.ceil(exact)} if system.prefills else {0}):
            fleet = replace(system, replicas=replicas, prefills=prefills)
            if bool(system.prefills) == bool(prefills) and _attains(fleet, profile, jobs):
                return fleet
        return None

    low, high, found = 0, start, enough(start)
    while found is None:
        low, high = high, high + max(1, high // 4)
        found = enough(high)
    while high - low > 1:
        middle = (low + high) // 2
        fleet = enough(middle)
        low, high, found = (middle, high, found) if fleet is None else (low, middle, fleet)
    return found


def _attains(fleet: FleetSystem, profile: Profile, jobs: np.ndarray) -> bool:
    run = fleet.run(profile, jobs)
    return attainment(run_through(run, EarlyStop(run, "worst_tier"))).worst_tier >= TARGET


@dataclass(frozen=True)
class Usage:
    """What a run took and gave over the judged time."""

    replicas: float  # mean number in use, which is until ``LINGER_S`` after the last request
    attained_per_s: float
    worst_tier: float


def usage(run: Run) -> Usage:
    """Run to the end, counting the replicas in use."""
    window, counts, state = Window.of(run.jobs, WARM_UP), [], run.fleet.state[0]
    busy_s = np.full(len(run.engines.state), -math.inf)
    while True:
        run = enlarge_if_full(run)
        if not advance_run(run, state["now_s"] + LOOK_S, len(TPOT_S), MANY):
            break
        busy_s[run.engines.state["count"] > 0] = state["now_s"]
        if window.start_s <= state["now_s"] <= window.end_s:
            counts.append(int((state["now_s"] - busy_s <= LINGER_S).sum()))
    heads = window.first_requests(run.jobs)
    met = attained(run.jobs, run.records)["dslo"][heads].sum()
    span_s = window.end_s - window.start_s
    return Usage(float(np.mean(counts)), float(met / span_s), attainment(run).worst_tier)


def headline(points: Sequence[Point]) -> dict[str, float]:
    """Cost of the elastic fleet over that of the static one: worst and mean over rates and modes, and per mode."""
    ratios = {p["key"]: p["elastic"]["median"] / p["static"]["median"] for p in points}
    figures = {"cost_ratio_worst_rate": max(ratios.values()), "cost_ratio_mean": float(np.mean(list(ratios.values())))}
    for name, mode in (("colocated", ""), ("apart", "-apart")):
        own = [ratios[p["key"]] for p in points if p["mode"] == mode]
        figures |= {f"cost_ratio_worst_{name}": max(own)} if own else {}
    figures["worst_tier_least"] = min(p["worst_tier"]["low"] for p in points)
    return {name: round(value, 4) for name, value in figures.items()}


def tables(points: Sequence[Point]) -> str:
    rows = [
        [
            "apart" if p["mode"] else "co-located",
            p["rate_per_s"],
            p["used"]["median"],
            int(p["replicas"]["median"]),
            1e3 * p["elastic"]["median"],
            1e3 * p["static"]["median"],
            p["elastic"]["median"] / p["static"]["median"],
            p["worst_tier"]["low"],
            f"{p['comfort']:g}" + (f", prompts {p['prefill_comfort']:g}" if p["mode"] else ""),
            p["budget"],
        ]
        for p in points
    ]
    header = ("mode", "req/s", "replicas used", "static replicas", "replica-ms per attained request", "static", "ratio")
    names = ("worst tier, worst seed", "comfortable load", "static setting")
    return markdown_table((*header, *names), rows)


POLYSERVE_COST = register(
    Experiment(
        "polyserve-cost",
        "Cost per request with replicas enough",
        config,
        tasks,
        run,
        headline,
        tables,
        lambda params, context: behaviour_of(context, DATA_SET, MODES[params["mode"]]),
    )
)
