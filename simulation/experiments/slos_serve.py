"""The evaluation of SLOs-Serve (section 6): capacity of one replica in six scenarios, and of up to four."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from profiles.profile import Profile
from profiles.store import load_profile
from simulation.experiments import dp_value
from simulation.experiments.behaviour import behaviour
from simulation.experiments.registry import Context, Experiment, Point, Task, register
from simulation.experiments.slos_serve_figures import EXACT, PEERS, STOCK, headline, tables
from simulation.experiments.tuning import BUDGETS, tuned_capacity, tuned_over
from simulation.studies.bound import fluid_bound_per_s
from simulation.studies.capacity import MakeJobs, Search, median_and_spread
from simulation.studies.promised import promises_at
from simulation.studies.systems import BASELINES, NOISES, PLANNER, DistServe, FleetOf, Straying, System, engine_model
from simulation.workloads.scenarios import CODE, CONV, SCENARIOS, make_scenario
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
VALUE = "value"  # the kind of the points of ``dp_value``
SCALED = ("ChatBot", "Coder")
STRAYING = ("noise10", "noise20", "slow10")
WITHOUT_NOISE = ("sarathi-shed", "edf", "sjf", "planner-oracle")  # no figure under noise is a ratio over them


def config(quick: bool) -> dict[str, Any]:
    """``fleet_...`` is for everything that goes through the controller's own objects, which takes longest, and for all
    that is compared with it on engines that stray."""
    if quick:
        quick_systems = ["planner", "planner-spec", *STOCK, "edf-shed", "no-admission", "distserve", *PEERS]
        return {
            "gpus": list(GPUS[:1]), "scenarios": list(SCENARIOS), "systems": quick_systems, "programs": 300,
            "seeds": [1], "budgets": [512, 2048], "drafts": [0, 2], "target": 0.9, "strict_target": 0.98,
            "tolerance": 0.1, "replicas": [1, 4], "fleet_gpus": list(GPUS[:1]), "fleet_programs": 200,
            "fleet_tolerance": 0.2, "noises": list(STRAYING), "noise_scenarios": ["ChatBot"],
            "noise_systems": ["planner", "no-admission", "edf-shed", *STOCK], "noise_programs": 100,
            "noise_replicas": [], "value": dp_value.config(quick),
        }  # fmt: skip
    return {
        "gpus": list(GPUS), "scenarios": list(SCENARIOS), "systems": list(SYSTEMS), "programs": 1000,
        "seeds": [1, 2, 3], "budgets": list(BUDGETS), "drafts": [0, 2, 4], "target": 0.9, "strict_target": 0.98,
        "tolerance": 0.02, "replicas": [1, 2, 4], "fleet_gpus": list(GPUS[:1]), "fleet_programs": 500,
        "fleet_tolerance": 0.05, "noises": list(STRAYING), "noise_scenarios": list(SCENARIOS),
        "noise_systems": [name for name in SYSTEMS if name not in WITHOUT_NOISE], "noise_programs": 500,
        "noise_replicas": [1, 4], "value": dp_value.config(quick),
    }  # fmt: skip


def tasks(config: dict[str, Any]) -> list[Task]:
    """One task per GPU, scenario and system; fleets and the 2 % limit beside them. Baselines first, fleets last, and
    behind them all of that once more on engines that stray, on the first GPU."""
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
    values = [Task(f"value/{task.key}", {**task.params, "kind": VALUE}) for task in dp_value.tasks(config["value"])]
    return [*sorted(found, key=_rank), *sorted(_straying_tasks(config), key=_rank), *values]


def _straying_tasks(config: dict[str, Any]) -> Iterator[Task]:
    """Every system and fleet on engines that do not keep to their profile."""
    gpu = config["gpus"][0]
    for noise in config["noises"]:
        for scenario in config["noise_scenarios"]:
            common = {**_measured(config, gpu, scenario, PEERS[0]), "programs": config["noise_programs"]}
            common["noise"] = noise
            for system in config["noise_systems"]:
                own = {**common, **tuned_over(SYSTEMS[system]), "kind": "capacity", "system": system}
                yield Task(f"{noise}/{gpu}/{scenario}/{system}", own)
            for replicas in config["noise_replicas"] if scenario in SCALED else ():
                own = {**common, "kind": "fleet", "fleet": replicas}
                yield Task(f"{noise}/{gpu}/{scenario}/fleet of {replicas}", own)


def _rank(task: Task) -> int:
    system = SYSTEMS[task.params["system"]]
    if system.is_oracle:
        return 3
    return 2 if isinstance(system, FleetOf) else int(system.admits)


def _measured(config: dict[str, Any], gpu: str, scenario: str, system: str) -> dict[str, Any]:
    """What a task on a GPU, scenario and system is told."""
    common = {name: config[name] for name in ("seeds", "budgets", "drafts", "target", "tolerance", "programs")}
    if isinstance(SYSTEMS[system], FleetOf | DistServe):  # the same arrivals: they are compared
        common |= {"tolerance": config["fleet_tolerance"], "programs": config["fleet_programs"]}
    return {**common, **tuned_over(SYSTEMS[system]), "gpu": gpu, "scenario": scenario, "system": system}


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
    """One point; on engines that stray, a planner's promises are counted too."""
    if params["kind"] == VALUE:
        return {"kind": VALUE, **dp_value.run(params, context)}
    profile, make = _setting(params, context)
    bounds = bounds_of(profile, make, params["seeds"])
    bound = bounds["bound_fluid"]
    point = {**{name: params[name] for name in ("kind", "gpu", "scenario", "noise") if name in params}, **bounds}
    if params["kind"] == "fleet":
        return {**point, "replicas": params["fleet"], **_fleet_capacity(params, profile, make, bound)}
    system = _system(params)
    _, tuning = _setting({**params, "programs": max(200, params["programs"] // 3)}, context)
    found = {"system": system.name, **tuned_capacity(system, profile, make, tuning, bound, dict(params))}
    if "noise" in params and system.name == PLANNER.name:
        rates = list(zip(params["seeds"], found["worst_tier"]["seeds"], strict=True))
        found |= promises_at(system, profile, make, rates)
    return {**point, **found}


def _setting(params: Mapping[str, Any], context: Context) -> tuple[Profile, MakeJobs]:
    return setting(context.traces, params["gpu"], params["scenario"], params["programs"])


def _straying(params: Mapping[str, Any]) -> Straying:
    return NOISES[params.get("noise", EXACT)]


def _system(params: Mapping[str, Any]) -> System:
    """The system of a task. On engines that stray the planner is the live controller's fleet over one replica."""
    if params["kind"] == "fleet":
        return FleetOf("fleet", admits=True, replicas=params["fleet"], straying=_straying(params))
    known = SYSTEMS[params["system"]]
    system = FleetOf(known.name, admits=True, replicas=1) if known is PLANNER and "noise" in params else known
    return replace(system, straying=_straying(params), draft_s=DRAFT_S[params["gpu"]])


def behaves(params: Mapping[str, Any], context: Context) -> str:
    """What the task's system does now."""
    if params["kind"] == VALUE:
        return dp_value.behaves(params, context)
    return behaviour(_system(params), *_setting(params, context))


def _fleet_capacity(params: Mapping[str, Any], profile: Profile, make: MakeJobs, bound: float) -> Point:
    """Capacity of a whole fleet under the controller's own Fleet, and of one behind a round-robin balancer."""
    size, found = params["fleet"], {}
    for name, hops in (("fleet", 8), ("pooled", 1)):
        system = FleetOf(name, admits=True, replicas=size, max_hops=hops, straying=_straying(params))
        rates = []
        for seed in params["seeds"]:
            search = Search(system, profile, make, seed, params["target"], params["tolerance"])
            rates.append(search.capacity("worst_tier", 0.6 * bound * size))
        found[name] = {**median_and_spread(rates), "seeds": rates}
    return found


def _parts(points: Sequence[Point]) -> tuple[list[Point], list[Point]]:
    """Capacities, and values attained."""
    return [p for p in points if p["kind"] != VALUE], [p for p in points if p["kind"] == VALUE]


def _quoted(points: Sequence[Point]) -> dict[str, float]:
    """Capacities, and what the DP is worth."""
    rates, values = _parts(points)
    return {**headline(rates), **{key: x for key, x in dp_value.headline(values).items() if key != "kept_min"}}


def _tables(points: Sequence[Point]) -> str:
    rates, values = _parts(points)
    parts = [tables(rates)] + (["### Value attained\n\n" + dp_value.tables(values)] if values else [])
    return "\n\n".join(parts)


SLOS_SERVE = register(
    Experiment("slos-serve", "Capacity in six scenarios (SLOs-Serve)", config, tasks, run, _quoted, _tables, behaves)
)
