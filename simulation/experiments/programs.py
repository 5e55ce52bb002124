"""Agent programs with deadlines: how many end in time, and how tight deadlines may be, beside systems of others.

Programs are closed loops: recorded coding-agent sessions, and fan-out research programs. A deadline is the critical
path on an idle engine that holds every conversation, with calls ``scale`` times as long and tools as they are. No
system knows output lengths, how many calls follow, or how long a tool takes. Engines stray by 10 %.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from controller.options import FleetOptions
from profiles.profile import Profile
from profiles.store import load_profile
from protocol.messages import Verdict
from routing.policy import make_routing, routing_names
from simulation.core.loop import Simulation
from simulation.core.prefix_cache import PrefixCache
from simulation.dispatchers.live_fleet import ControllerDispatcher, tiers_of
from simulation.experiments.program_figures import headline, tables
from simulation.experiments.program_systems import ABLATIONS, SYSTEMS, Rival
from simulation.experiments.registry import Context, Experiment, Point, Task, register
from simulation.studies.systems import NOISES, FleetOf
from simulation.workloads.arrivals import poisson_s
from simulation.workloads.programs import ProgramLoad, chosen_sessions, research, sessions_of, together
from simulation.workloads.settings import Calls, read_calls
from simulation.workloads.traces import Trace, read_trace

GPU, TRACE = "h200_sxm__llama-3.1-8b", "agentic_coding_a"
CALLS, LONGEST_PROMPT = (3, 40), 150_000
REPORT_S = 0.15  # between two reports of a replica, the longest of live ones
BUDGETS, AFFINITIES = [256, 512, 1024, 2048, 8192], [1.0, 12.5]  # that rivals choose from: tokens, times their own
TUNING_SEED = 1000
LONGEST_TAKEN = 2.0  # times the deadline: as much as a program without an end counts where settings are compared


def config(quick: bool) -> dict[str, Any]:
    """Loads begin with their kind; their figures are programs a second."""
    systems = [name for name, system in SYSTEMS.items() if system.routing in routing_names()]
    if quick:
        rivals = [name for name in systems if name not in ABLATIONS]
        return {"loads": {"coding overload": 0.12}, "systems": rivals, "scales": [4.0], "reference": 4.0,
                "programs": 40, "replicas": 2, "budgets": [2048], "affinities": [1.0], "seeds": [1]}  # fmt: skip
    return {"loads": {"coding overload": 0.12, "coding": 0.06}, "systems": systems, "scales": [2.0, 3.0, 4.0, 6.0],
            "reference": 4.0, "programs": 40, "replicas": 2, "budgets": BUDGETS, "affinities": AFFINITIES,
            "seeds": [1, 2, 3]}  # fmt: skip


def tasks(config: dict[str, Any]) -> list[Task]:
    """One task per load, seed and system, and ablations with the first seed alone; systems that know no deadline run
    once for all scales. The first load with all its seeds comes before the next: a run may end early."""
    common = {name: config[name] for name in ("programs", "replicas", "reference", "scales")}
    choices = {name: config[name] for name in ("budgets", "affinities")}
    runs = [
        (load, seed, system)
        for load in config["loads"]
        for seed in config["seeds"]
        for system in config["systems"]
        if system not in ABLATIONS or seed == config["seeds"][0]
    ]
    return [
        Task(
            f"{load}/{system}/seed {seed}",
            {
                **common,
                **({} if SYSTEMS[system].admits else choices),
                "load": load,
                "per_s": config["loads"][load],
                "system": system,
                "seed": seed,
            },
        )
        for load, seed, system in runs
    ]


@lru_cache(maxsize=2)
def _trace(path: Path) -> tuple[Trace, Calls]:
    trace = read_trace(path)
    return trace, read_calls(path, trace)


def make_load(params: Mapping[str, Any], context: Context, seed: int, is_history: bool = False) -> ProgramLoad:
    """The programs of a run, or others of the same kinds that ended before it."""
    rng, count = np.random.default_rng((seed, is_history)), params["programs"]
    kind = params["load"].partition(" ")[0]
    if kind == "research":
        return research(rng, poisson_s(rng, count, params["per_s"]))
    trace, calls = _trace(context.traces / f"{TRACE}.parquet")
    names = chosen_sessions(trace, CALLS, LONGEST_PROMPT)
    names = np.random.default_rng(seed).permutation(names)  # the same cut for both halves
    half = len(names) // 2
    own = (names[half:] if is_history else names[:half])[:count]
    coding = sessions_of(trace, calls, own, poisson_s(rng, len(own), params["per_s"]), "coding")
    if kind == "coding":
        return coding
    return together(coding, research(rng, poisson_s(rng, 4 * count, 4 * params["per_s"])))


def simulate(system: Rival, load: ProgramLoad, past: ProgramLoad, scale: float, run: Mapping[str, Any]) -> Simulation:
    """A finished run under deadlines of this scale; ``run``: profile, trace blocks, replicas, seed, and straying."""
    simulation = prepared(system, load, past, scale, run)
    judged = [scale] if system.knows_programs else run["scales"]
    heads = load.deadlines_s(run["profile"].coefficients, max(judged))
    last_s = max(float(load.jobs["arrival_s"][head]) + due_s for head, due_s in heads.items())
    simulation.run(lambda running: running.now_s > last_s)  # what ends later is late
    return simulation


def prepared(system: Rival, load: ProgramLoad, past: ProgramLoad, scale: float, run: Mapping[str, Any]) -> Simulation:
    """The same before it begins."""
    profile: Profile = run["profile"]
    options = FleetOptions(
        routing=system.routing, admission=system.admits, seed=run["seed"], prefix_affinity=system.affinity,
        block_tokens=run["block_tokens"], programs=system.programs,
    )  # fmt: skip
    told = load.told(load.deadlines_s(profile.coefficients, scale)) if system.knows_programs else {}
    dispatcher = ControllerDispatcher(profile, tiers_of(load.jobs), options, run["blocks"], told, report_s=REPORT_S)
    for app, nodes in past.graphs(profile.coefficients):
        dispatcher.fleet.programs.learn("", app, nodes, 0.0)
    straying = run.get("straying", NOISES["noise10"])
    engines = FleetOf("", system.policy, token_budget=system.budget, replicas=run["replicas"], straying=straying)
    return Simulation(
        load.jobs, engines.engines(profile, run["seed"]), dispatcher,
        prefixes=PrefixCache(run["blocks"], run["block_tokens"], load.jobs, run["replicas"]), edges=load.edges,
    )  # fmt: skip


def taken(simulation: Simulation, deadlines_s: Mapping[int, float]) -> Any:
    """How long each program took until its last token, in deadlines, in order of first jobs (float[p]); inf: no end."""
    heads, ended = simulation.jobs["program"], simulation.records["ended"]
    latest = np.zeros(len(heads))
    np.maximum.at(latest, heads, np.where(ended, simulation.records["last_s"], np.inf))
    arrival_s = simulation.jobs["arrival_s"]
    return np.array([(latest[head] - arrival_s[head]) / due_s for head, due_s in deadlines_s.items()])


def in_time(simulation: Simulation, deadlines_s: Mapping[int, float]) -> Any:
    """Whether the last token of each program came by its deadline, in order of first jobs (bool[p])."""
    return taken(simulation, deadlines_s) <= 1.0


def setting_of(params: Mapping[str, Any], context: Context, seed: int) -> dict[str, Any]:
    """What all runs on one load share, beside its programs."""
    trace = None if params["load"].startswith("research") else _trace(context.traces / f"{TRACE}.parquet")[0]
    return {
        "profile": load_profile(GPU), "replicas": params["replicas"], "seed": seed, "scales": params["scales"],
        "blocks": trace.blocks if trace else np.zeros(0, dtype=np.int64),
        "block_tokens": trace.block_tokens if trace else 512,
    }  # fmt: skip


def promised_of(system: Rival, simulation: Simulation, jobs: Iterable[int]) -> Any:
    """Which of these jobs were promised (bool[n]): each, where a system admits all, else none that still waits."""
    if not system.admits:
        return np.array([True for _ in jobs])
    verdicts = {int(d.request_id): d.verdict for d in simulation.dispatcher.decisions}  # type: ignore[attr-defined]
    return np.array([verdicts.get(int(job)) == Verdict.ADMITTED for job in jobs])


def tuned(system: Rival, params: Mapping[str, Any], context: Context) -> Rival:
    """A rival with the budget and the affinity that end most programs in time, and among equals the earliest, on
    programs of a seed of their own."""
    if system.admits or len(params["budgets"]) * len(params["affinities"]) == 1:
        return system
    known = {name: tuple(value) if isinstance(value, list) else value for name, value in params.items()}
    del known["seed"], known["system"]
    return _best_setting(system, tuple(sorted(known.items())), context)


@lru_cache(maxsize=64)
def _best_setting(system: Rival, known: tuple[tuple[str, Any], ...], context: Context) -> Rival:
    """For all seeds of a load (``known``: a task's parameters without its seed and system)."""
    params = dict(known)
    load, past = (make_load(params, context, TUNING_SEED, is_history) for is_history in (False, True))
    setting, scale = setting_of(params, context, TUNING_SEED), params["reference"]
    heads, worth = load.deadlines_s(setting["profile"].coefficients, scale), {}
    affinities = [1.0] if make_routing(system.routing).counts_held else params["affinities"]
    for budget, times in product(params["budgets"], affinities):
        tried = replace(system, budget=budget, affinity=times * system.affinity)
        told = taken(simulate(tried, load, past, scale, setting), heads)
        worth[tried] = float((told <= 1.0).mean()), -float(np.minimum(told, LONGEST_TAKEN).mean())
    return max(worth, key=lambda tried: worth[tried])


def run(params: Mapping[str, Any], context: Context) -> Point:
    system, seed = tuned(SYSTEMS[params["system"]], params, context), params["seed"]
    load, past = make_load(params, context, seed), make_load(params, context, seed, is_history=True)
    setting, simulation, heads = setting_of(params, context, seed), None, np.unique(load.jobs["program"])
    told: dict[str, list[float]] = {name: [] for name in ("on_time", "in_time", "refused", "kept", "cached")}
    point = {name: params[name] for name in ("load", "system", "seed", "scales", "reference")}
    for scale in params["scales"]:
        if simulation is None or system.knows_programs:
            simulation = simulate(system, load, past, scale, setting)
        met = in_time(simulation, load.deadlines_s(setting["profile"].coefficients, scale))
        promised = promised_of(system, simulation, heads)
        kept, refused = float((met & promised).mean()), float((~promised).mean())
        told["on_time"].append(kept)
        told["in_time"].append(float(met.mean()))
        told["refused"].append(refused)
        told["kept"].append(kept / (1.0 - refused) if refused < 1.0 else 1.0)
        told["cached"].append(cached_share(simulation))
    return {**point, "budget": system.budget, "affinity": system.affinity, **told}


def cached_share(simulation: Simulation) -> float:
    """Share of the prompt tokens of served calls that a prefix cache held."""
    served = simulation.records["emitted_tokens"] > 0
    prompt_tokens = int(simulation.jobs["prompt_tokens"][served].sum())
    return float(simulation.records["cached_tokens"][served].sum() / max(1, prompt_tokens))


def behaves(params: Mapping[str, Any], context: Context) -> str:
    """Digest of what the system does with a few research programs that arrive at once."""
    small = {**params, "load": "research", "per_s": 10.0, "programs": 6}
    system, load = SYSTEMS[params["system"]], make_load(small, context, 7)
    setting = {"profile": load_profile(GPU), "blocks": np.zeros(0, dtype=np.int64), "block_tokens": 512,
               "replicas": 1, "seed": 7, "scales": [2.0]}  # fmt: skip
    simulation = simulate(system, load, make_load(small, context, 7, is_history=True), 2.0, setting)
    return hashlib.blake2b(simulation.records.tobytes(), digest_size=8).hexdigest()


PROGRAMS = register(
    Experiment("programs", "Agent programs with deadlines", config, tasks, run, headline, tables, behaves)
)
