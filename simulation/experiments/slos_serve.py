"""The evaluation of SLOs-Serve (section 6): capacity of one replica in six scenarios, and of up to four."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from profiles.profile import Profile
from profiles.store import load_profile
from simulation.experiments.behaviour import behaviour
from simulation.experiments.registry import Context, Experiment, Point, Task, markdown_table, register
from simulation.experiments.tuning import BUDGETS, tuned_capacity
from simulation.studies.bound import fluid_bound_per_s
from simulation.studies.capacity import MakeJobs, Search, median_and_spread
from simulation.studies.systems import BASELINES, PLANNER, DistServe, FleetOf, System, engine_model
from simulation.workloads.scenarios import BURSTY, CODE, CONV, SCENARIOS, make_scenario
from simulation.workloads.traces import read_trace

GPUS = ("a100_sxm__llama-3.1-8b", "h100_sxm__llama-3.1-8b")
ACCEPTANCE = 0.7
DRAFT_S = {"a100_sxm__llama-3.1-8b": 0.0015, "h100_sxm__llama-3.1-8b": 0.0010}  # one step of a small draft model
MAX_DRAFTS = 4
SYSTEMS = {
    system.name: system
    for system in (
        PLANNER,
        *BASELINES,
        replace(PLANNER, name="no-admission", admits=False, sheds=True),
        DistServe("distserve", "vllm", token_budget=2048),
        FleetOf("planner-x2", admits=True, replicas=2),
        FleetOf("planner-x3", admits=True, replicas=3),
        System("vllm-spec", "vllm", token_budget=2048, drafts=1, acceptance=ACCEPTANCE),
        replace(PLANNER, name="planner-spec", drafts=MAX_DRAFTS, adapts_drafts=True, acceptance=ACCEPTANCE),
        replace(PLANNER, name="planner-oracle", is_oracle=True),
    )
}
STOCK = ("vllm-2048", "vllm-whole", "sarathi")
PEERS = ("planner-x2", "planner-x3")  # as many GPUs as DistServe has, whose bursts they share as it does
SIMPLE_RIVALS = ("edf-shed", "sarathi-shed")
SCALED = ("ChatBot", "Coder")
Capacities = dict[tuple[str, str, str], float]  # by GPU, scenario and system


def config(quick: bool) -> dict[str, Any]:
    """``fleet_...`` is for everything that goes through the controller's own objects, which takes longest."""
    if quick:
        quick_systems = ["planner", "planner-spec", *STOCK, "edf-shed", "distserve", *PEERS]
        return {
            "gpus": list(GPUS[:1]), "scenarios": list(SCENARIOS), "systems": quick_systems, "programs": 300,
            "seeds": [1], "budgets": [512, 2048], "drafts": [0, 2], "target": 0.9, "strict_target": 0.98,
            "tolerance": 0.1, "replicas": [1, 4], "fleet_gpus": list(GPUS[:1]), "fleet_programs": 200,
            "fleet_tolerance": 0.2,
        }  # fmt: skip
    return {
        "gpus": list(GPUS), "scenarios": list(SCENARIOS), "systems": list(SYSTEMS), "programs": 1000,
        "seeds": [1, 2, 3], "budgets": list(BUDGETS), "drafts": [0, 2, 4], "target": 0.9, "strict_target": 0.98,
        "tolerance": 0.02, "replicas": [1, 2, 4], "fleet_gpus": list(GPUS[:1]), "fleet_programs": 500,
        "fleet_tolerance": 0.05,
    }  # fmt: skip


def tasks(config: dict[str, Any]) -> list[Task]:
    """One task per GPU, scenario and system; fleets and the 2 % limit beside them. Baselines first, fleets last."""
    found = [
        Task(f"{gpu}/{scenario}/{system}", {**_measured(config, gpu, scenario, system), "kind": "capacity"})
        for gpu in config["gpus"]
        for system in config["systems"]
        for scenario in config["scenarios"]
        if gpu in config["fleet_gpus"] or not isinstance(SYSTEMS[system], FleetOf)
    ]
    first, strict = config["gpus"][0], {"kind": "strict", "target": config["strict_target"]}
    found += [
        Task(f"{first}/ChatBot/{system}/2%", {**_measured(config, first, "ChatBot", system), **strict})
        for system in ("planner", *(name for name in STOCK if name in config["systems"]))
    ]
    for scenario in SCALED:
        for replicas in config["replicas"]:
            fleet = {**_measured(config, first, scenario, PEERS[0]), "kind": "fleet", "fleet": replicas}
            found.append(Task(f"{first}/{scenario}/fleet of {replicas}", fleet))
    return sorted(found, key=_rank)


def _rank(task: Task) -> int:
    system = SYSTEMS[task.params["system"]]
    if system.is_oracle:
        return 3
    return 2 if isinstance(system, FleetOf) else int(system.admits)


def _measured(config: dict[str, Any], gpu: str, scenario: str, system: str) -> dict[str, Any]:
    """What a task on a GPU, scenario and system is told."""
    common = {name: config[name] for name in ("seeds", "budgets", "drafts", "target", "tolerance", "programs")}
    if isinstance(SYSTEMS[system], FleetOf):
        common |= {"tolerance": config["fleet_tolerance"], "programs": config["fleet_programs"]}
    return {**common, "gpu": gpu, "scenario": scenario, "system": system}


def arrival_traces(folder: Path) -> dict[str, np.ndarray]:
    """Arrival times of the two Azure traces."""
    return {name: read_trace(folder / f"{name}.parquet").arrival_s for name in (CONV, CODE)}


@lru_cache(maxsize=64)
def setting(folder: Path, gpu: str, scenario: str, programs: int) -> tuple[Profile, MakeJobs]:
    """Hardware, and the jobs of a scenario there by rate and seed; one object per setting, for those who keep more."""
    traces, profile = arrival_traces(folder), load_profile(gpu)

    def make(rate_per_s: float, seed: int) -> np.ndarray:
        return make_scenario(scenario, traces, profile.coefficients, rate_per_s, programs, seed)

    return profile, make


def bounds_of(profile: Profile, make: MakeJobs, seeds: Sequence[int]) -> dict[str, float]:
    """Bounds in programs per second, median over seeds: with waits for first tokens, fluid, and knowing lengths."""
    engine = engine_model(profile)
    kinds = {
        "bound": {"counts_waits": True},
        "bound_fluid": {},
        "bound_dearest_dropped": {"drops_dearest": True},
    }
    return {
        name: float(np.median([fluid_bound_per_s(make(1.0, seed), engine, **how) for seed in seeds]))
        for name, how in kinds.items()
    }


def run(params: Mapping[str, Any], context: Context) -> Point:
    """One point."""
    profile, make = _setting(params, context)
    bounds = bounds_of(profile, make, params["seeds"])
    bound = bounds["bound_fluid"]
    point = {**{name: params[name] for name in ("kind", "gpu", "scenario")}, **bounds}
    if params["kind"] == "fleet":
        return {**point, "replicas": params["fleet"], **_fleet_capacity(params, profile, make, bound)}
    system = _system(params)
    _, tuning = _setting({**params, "programs": max(200, params["programs"] // 3)}, context)
    return {**point, "system": system.name, **tuned_capacity(system, profile, make, tuning, bound, dict(params))}


def _setting(params: Mapping[str, Any], context: Context) -> tuple[Profile, MakeJobs]:
    return setting(context.traces, params["gpu"], params["scenario"], params["programs"])


def _system(params: Mapping[str, Any]) -> System:
    if params["kind"] == "fleet":
        return FleetOf("fleet", admits=True, replicas=params["fleet"])
    return replace(SYSTEMS[params["system"]], draft_s=DRAFT_S[params["gpu"]])


def behaves(params: Mapping[str, Any], context: Context) -> str:
    """What the task's system does now."""
    return behaviour(_system(params), *_setting(params, context))


def _fleet_capacity(params: Mapping[str, Any], profile: Profile, make: MakeJobs, bound: float) -> Point:
    """Capacity of a whole fleet under the controller's own Fleet, and of one behind a round-robin balancer."""
    size, found = params["fleet"], {}
    for name, hops in (("fleet", 8), ("pooled", 1)):
        system = FleetOf(name, admits=True, replicas=size, max_hops=hops)
        rates = []
        for seed in params["seeds"]:
            search = Search(system, profile, make, seed, params["target"], params["tolerance"])
            rates.append(search.capacity("worst_tier", 0.6 * bound * size))
        found[name] = {**median_and_spread(rates), "seeds": rates}
    return found


def _ratio(
    points: Mapping[tuple[str, str, str], float], gpu: str, scenario: str, ours: str, theirs: Sequence[str]
) -> float:
    """Capacity of ``ours`` over the best of ``theirs``; nan where one was not run."""
    known = [points[gpu, scenario, name] for name in theirs if (gpu, scenario, name) in points]
    if not known or (gpu, scenario, ours) not in points:
        return float("nan")
    return points[gpu, scenario, ours] / max(known) if max(known) > 0 else float("inf")


def capacities(points: Sequence[Point]) -> Capacities:
    """Median per-tier capacity by GPU, scenario and system."""
    return {
        (p["gpu"], p["scenario"], p["system"]): p["worst_tier"]["median"] for p in points if p["kind"] == "capacity"
    }


def geomean(values: Sequence[float]) -> float:
    """Geometric mean of the finite values; nan without any."""
    known = np.array([v for v in values if np.isfinite(v)])
    return float(np.exp(np.log(known).mean())) if len(known) else float("nan")


def headline(points: Sequence[Point]) -> dict[str, float]:
    """The figures that are quoted; each over all GPUs and scenarios that were run."""
    known = capacities(points)
    places = sorted({(gpu, scenario) for gpu, scenario, _ in known})

    def over(ours: str, theirs: Sequence[str]) -> list[float]:
        return [_ratio(known, gpu, scenario, ours, theirs) for gpu, scenario in places]

    steady = [p for p in points if p["kind"] == "capacity" and p["system"] == "planner" and p["scenario"] not in BURSTY]
    shed = [value for value in over("planner", SIMPLE_RIVALS) if np.isfinite(value)]
    figures = {
        "capacity_ratio_vs_best_geomean": geomean(over("planner", STOCK)),
        "capacity_ratio_vs_best_geomean_spec": geomean(over("planner-spec", (*STOCK, "vllm-spec"))),
        "capacity_ratio_vs_distserve_geomean": geomean(_over_distserve(points)),
        "capacity_ratio_vs_shed_min": min(shed, default=float("nan")),
        "of_bound_steady_min": _least_of(steady, "bound"),
        "of_fluid_bound_steady_min": _least_of(steady, "bound_fluid"),
        "scaling_4_chatbot": _scaling(points, "ChatBot", "fleet"),
        "scaling_4_coder": _scaling(points, "Coder", "fleet"),
        "scaling_4_coder_pooled": _scaling(points, "Coder", "pooled"),
        "capacity_ratio_at_2pct": _strict_ratio(points),
    }
    return {name: round(value, 4) for name, value in figures.items() if np.isfinite(value)}


def _least_of(points: Sequence[Point], bound: str) -> float:
    """Least share of a bound that was reached; nan without points."""
    return min((p["worst_tier"]["median"] / p[bound] for p in points), default=float("nan"))


def _over_distserve(points: Sequence[Point]) -> list[float]:
    """Capacity per GPU of a planned fleet over that of DistServe with as many GPUs, per GPU kind and scenario."""
    own = {(p["gpu"], p["scenario"], p["system"]): p for p in points if p["kind"] == "capacity"}
    ratios = []
    for (gpu, scenario, system), p in own.items():
        peer = own.get((gpu, scenario, PEERS[0] if p["setting"] == "1:1" else PEERS[1]))
        if system == "distserve" and peer is not None and p["worst_tier"]["median"] > 0:
            ratios.append(peer["worst_tier"]["median"] / p["worst_tier"]["median"])
    return ratios


def _scaling(points: Sequence[Point], scenario: str, how: str) -> float:
    """Capacity of four replicas over that of one under the same controller."""
    found = {p["replicas"]: p[how]["median"] for p in points if p["kind"] == "fleet" and p["scenario"] == scenario}
    return float(found[4] / found[1]) if {1, 4} <= set(found) and found[1] > 0 else float("nan")


def _strict_ratio(points: Sequence[Point]) -> float:
    found = {p["system"]: p["worst_tier"]["median"] for p in points if p["kind"] == "strict"}
    rivals = [value for name, value in found.items() if name != "planner"]
    return (
        float(found["planner"] / max(rivals)) if "planner" in found and max(rivals, default=0.0) > 0 else float("nan")
    )


def tables(points: Sequence[Point]) -> str:
    """Capacity per GPU, scenario and system, then fleets."""
    parts = []
    for gpu in sorted({p["gpu"] for p in points}):
        own = [p for p in points if p["gpu"] == gpu and p["kind"] == "capacity"]
        rows: list[list[object]] = []
        for scenario in dict.fromkeys(p["scenario"] for p in own):
            for p in (p for p in own if p["scenario"] == scenario):
                spread = f"{p['worst_tier']['low']:.3g} to {p['worst_tier']['high']:.3g}"
                tier, overall = p["worst_tier"]["median"], p["overall"]["median"]
                of_bounds = tier / p["bound"], tier / p["bound_fluid"]
                rows.append([scenario, p["system"], p["setting"], tier, spread, overall, *of_bounds])
        header = ("scenario", "system", "setting", "req/s per GPU, every tier", "over seeds", "overall",
                  "of the bound", "of the fluid one")  # fmt: skip
        parts.append(f"### {gpu}\n\n{markdown_table(header, rows)}")
    fleets = [p for p in points if p["kind"] == "fleet"]
    if fleets:
        rows = [[p["scenario"], p["replicas"], p["fleet"]["median"], p["pooled"]["median"]] for p in fleets]
        names = ("scenario", "replicas", "req/s, controller", "req/s, one try per request")
        parts.append(f"### Several replicas\n\n{markdown_table(names, rows)}")
    strict = [p for p in points if p["kind"] == "strict"]
    if strict:
        rows = [[p["system"], p["worst_tier"]["median"]] for p in strict]
        parts.append("### ChatBot at 98 % attainment\n\n" + markdown_table(("system", "req/s per GPU"), rows))
    return "\n\n".join(parts)


SLOS_SERVE = register(
    Experiment("slos-serve", "Capacity in six scenarios (SLOs-Serve)", config, tasks, run, headline, tables, behaves)
)
