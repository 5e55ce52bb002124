"""Routing policies side by side under the live controller's fleet; and what prefix affinity is worth on sessions."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from profiles.store import load_profile
from simulation.core.loop import Simulation
from simulation.core.metrics import Window, summarize
from simulation.core.prefix_cache import PrefixCache
from simulation.experiments.registry import Context, Experiment, Point, Task, markdown_table, register
from simulation.experiments.what_if import TPOT_S, TRACE, mixed_jobs
from simulation.studies.polyserve_bound import tier_costs_s
from simulation.studies.systems import FleetOf
from simulation.workloads.arrivals import poisson_s
from simulation.workloads.scenarios import zero_load_ttft_s
from simulation.workloads.settings import ServiceClass, closed_loop, read_calls
from simulation.workloads.traces import read_trace

GPU, SESSIONS_GPU = "a100_sxm__llama-3.1-8b", "h200_sxm__llama-3.1-8b"
SESSIONS_TRACE = "agentic_coding_a"
SPLIT = " on replicas of tiers"  # each tier has its own, as many as its share of the work; otherwise all are shared
ONE_POOL = ("marginal_load", "sequential", "balanced", "load_gradient")
APART = tuple(f"{name}{SPLIT}" for name in ("marginal_load", "balanced", "load_gradient", "silos"))
PLAIN = ("least_loaded", "power_of_two", "power_of_k", "remaining_memory", "minimal_iteration_time", "round_robin")
AFFINE = ("marginal_load", "balanced")
SLOWDOWN, LEAST_TTFT_S, SESSION_TPOT_S = 3.0, 1.0, 0.05  # TTFT of a session's call, over that on an idle replica
MAX_HOPS = 4  # the configuration's default
SMALL_PER_S, SMALL_REPLICAS, SMALL_JOBS = 10.0, 4, 200  # of the load by which a change of behaviour is noticed


def config(quick: bool) -> dict[str, Any]:
    if quick:
        return {"routings": ["marginal_load", "load_gradient", "power_of_two"], "replicas": 4, "rates": [7.0],
                "requests": 600, "weights": [0.0, 1.0], "affine": ["balanced"], "sessions": 4, "session_replicas": 2,
                "sessions_per_s": 0.01, "seeds": [1]}  # fmt: skip
    return {"routings": [*ONE_POOL, *APART, *PLAIN], "replicas": 20, "rates": [6.0, 10.0], "requests": 3000,
            "weights": [0.0, 0.25, 1.0], "affine": list(AFFINE), "sessions": 20, "session_replicas": 4,
            "sessions_per_s": 0.02, "seeds": [1, 2, 3]}  # fmt: skip


def tasks(config: dict[str, Any]) -> list[Task]:
    common = {name: config[name] for name in ("replicas", "requests")}
    sessions = {name: config[name] for name in ("sessions", "session_replicas", "sessions_per_s")}
    policies = [
        Task(f"{name}/{rate:g}/seed {seed}", {**common, "routing": name, "rate": rate, "seed": seed})
        for rate in config["rates"]
        for name in config["routings"]
        for seed in config["seeds"]
    ]
    affinity = [
        Task(f"{name}/affinity {weight:g}/seed {seed}", {**sessions, "routing": name, "weight": weight, "seed": seed})
        for name in config["affine"]
        for weight in config["weights"]
        for seed in config["seeds"]
    ]
    return [*policies, *affinity]


def run(params: Mapping[str, Any], context: Context) -> Point:
    return _sessions(params, context) if "weight" in params else _policy(params, context)


def _policy(params: Mapping[str, Any], context: Context) -> Point:
    """One policy on mixed tiers; lengths are known by the mean of their tier only."""
    simulation, split = _run(params, context, params["replicas"], params["requests"])
    figures = summarize(simulation.jobs, simulation.records, simulation.engines.state, Window.of(simulation.jobs))
    point = {name: params[name] for name in ("routing", "rate", "seed")}
    shares = list(figures["by_tier"].values())
    return {**point, "split": list(split), "attainment": figures["attainment"]["dslo"], "by_tier": shares,
            "refused": figures["refused"], "busy": figures["busy"]}  # fmt: skip


def _run(params: Mapping[str, Any], context: Context, replicas: int, requests: int) -> tuple[Simulation, Sequence[int]]:
    """A finished run of a policy, and the replicas of each tier where they are apart."""
    profile, trace = load_profile(GPU), read_trace(context.traces / f"{TRACE}.parquet")
    routing, apart, _ = params["routing"].partition(SPLIT)
    jobs = mixed_jobs(trace, requests, params["rate"] * replicas, params["seed"])
    split = split_by_work(tier_costs_s(jobs, profile, False), jobs, replicas) if apart else ()
    system = FleetOf(routing, admits=True, replicas=replicas, routing=routing, max_hops=MAX_HOPS, split=split)
    engines = system.engines(profile, params["seed"])
    simulation = Simulation(jobs, engines, system.dispatcher(profile, jobs, params["seed"]))
    simulation.run()
    return simulation, split


def split_by_work(costs_s: np.ndarray, jobs: np.ndarray, replicas: int) -> tuple[int, ...]:
    """Whole replicas for each tier by its share of the work, by largest remainder, at least one each."""
    work = np.bincount(jobs["tier"], minlength=len(TPOT_S)) * costs_s
    exact = work / work.sum() * replicas
    count = np.maximum(1, np.floor(exact).astype(np.int64))
    while count.sum() != replicas:
        short = count.sum() < replicas
        count[np.argmax(exact - count) if short else np.argmax(count - exact)] += 1 if short else -1
    return tuple(count.tolist())


def _sessions(params: Mapping[str, Any], context: Context) -> Point:
    """Coding-agent sessions as closed loops on replicas with prefix caches; a call's TTFT is three idle ones."""
    path, profile = context.traces / f"{SESSIONS_TRACE}.parquet", load_profile(SESSIONS_GPU)
    trace, replicas, seed = read_trace(path), params["session_replicas"], params["seed"]
    calls, agent = read_calls(path, trace), ServiceClass("agent", tpot_s=SESSION_TPOT_S)
    jobs, edges = closed_loop(
        np.random.default_rng(seed), trace, calls, params["sessions"],
        lambda rng, count: poisson_s(rng, count, params["sessions_per_s"]), agent,
    )  # fmt: skip
    idle_s = zero_load_ttft_s(profile.coefficients, jobs["prompt_tokens"].astype(np.float64))
    jobs["ttft_s"] = np.maximum(LEAST_TTFT_S, SLOWDOWN * idle_s)
    system = FleetOf(
        params["routing"], admits=True, replicas=replicas, routing=params["routing"], max_hops=MAX_HOPS,
        prefix_affinity=params["weight"], trace=trace,
    )  # fmt: skip
    simulation = Simulation(
        jobs, system.engines(profile, seed), system.dispatcher(profile, jobs, seed),
        prefixes=PrefixCache(trace.blocks, trace.block_tokens, jobs, replicas), edges=edges,
    )  # fmt: skip
    simulation.run()
    records, asked = simulation.records, simulation.jobs
    ttft_s, met = records["first_s"] - asked["arrival_s"], records["promised"] & (records["late_tokens"] == 0)
    point = {name: params[name] for name in ("routing", "weight", "seed")}
    return {**point, "hit_share": float(records["cached_tokens"].sum() / asked["prompt_tokens"].sum()),
            "attainment": float(met.mean()), "ttft_mean_s": float(ttft_s.mean()),
            "ttft_p95_s": float(np.percentile(ttft_s, 95)), "calls": len(jobs),
            "prefill_tokens": int(simulation.engines.state["prefill_tokens"].sum())}  # fmt: skip


def _by(points: Sequence[Point], *keys: str) -> dict[tuple[Any, ...], list[Point]]:
    """Points by the values of these keys, in order of appearance."""
    found: dict[tuple[Any, ...], list[Point]] = {}
    for point in points:
        found.setdefault(tuple(point[key] for key in keys), []).append(point)
    return found


def _spread(points: Sequence[Point], key: str, digits: int = 3) -> str:
    """The median over seeds, and least and most where there are several."""
    values = [float(p[key]) for p in points]
    told = f"{np.median(values):.{digits}f}"
    return told if len(values) == 1 else f"{told} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def behaves(params: Mapping[str, Any], context: Context) -> str:
    """Digest of what the policy does with a small load, more than it can serve."""
    simulation, _ = _run({"rate": SMALL_PER_S, **params}, context, SMALL_REPLICAS, SMALL_JOBS)
    return hashlib.blake2b(simulation.records.tobytes(), digest_size=8).hexdigest()


def headline(points: Sequence[Point]) -> dict[str, float]:
    """Median attainment of every policy at every rate, and hits of every weight."""
    policies = _by([p for p in points if "rate" in p], "routing", "rate")
    sessions = _by([p for p in points if "weight" in p], "routing", "weight")
    figures = {f"attainment {n} {r:g}": np.median([p["attainment"] for p in own]) for (n, r), own in policies.items()}
    figures |= {f"hits {n} {w:g}": np.median([p["hit_share"] for p in own]) for (n, w), own in sessions.items()}
    return {name: round(float(value), 4) for name, value in figures.items()}


def tables(points: Sequence[Point]) -> str:
    rows = [
        [name, f"{rate:g}", _spread(own, "attainment"), *_tiers(own), _spread(own, "refused"), _spread(own, "busy", 2)]
        for (name, rate), own in _by([p for p in points if "rate" in p], "routing", "rate").items()
    ]
    affine = [
        [name, f"{weight:g}", _spread(own, "hit_share"), _spread(own, "attainment"), _spread(own, "ttft_mean_s", 2),
         _spread(own, "ttft_p95_s", 1), f"{np.median([p['prefill_tokens'] for p in own]) / 1e6:.1f}"]
        for (name, weight), own in _by([p for p in points if "weight" in p], "routing", "weight").items()
    ]  # fmt: skip
    tiers = [f"{1000 * tpot_s:g} ms" for tpot_s in TPOT_S]
    header = ("routing", "req/s per replica", "attained", *tiers, "not promised", "busy")
    names = ("routing", "affinity", "tokens hit", "calls attained", "mean TTFT s", "P95 s", "prompt tokens computed, M")
    return markdown_table(header, rows) + "\n\n" + markdown_table(names, affine)


def _tiers(points: Sequence[Point]) -> list[str]:
    """Median attainment of each tier."""
    return [f"{share:.2f}" for share in np.median([p["by_tier"] for p in points], axis=0)]


ROUTING = register(
    Experiment("routing", "Routing policies, and prefix affinity", config, tasks, run, headline, tables, behaves)
)
