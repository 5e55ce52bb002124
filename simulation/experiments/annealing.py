"""Priority mapping by annealing: against exhaustive search, and against arrival order on stray engines."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from planning.batch.annealing import anneal, predicted_jobs
from planning.engine import EngineModel
from planning.limits import make_limits
from profiles.store import load_profile
from simulation.core.jobs import make_jobs, to_rows
from simulation.core.loop import Simulation
from simulation.core.metrics import attained
from simulation.experiments.registry import Context, Experiment, Point, Task, markdown_table, register
from simulation.experiments.tempo import GPU
from simulation.studies.exhaustive import MOST_JOBS, best_plan
from simulation.studies.systems import NOISES, System
from simulation.workloads.applications import Printed

TTFT_S, TPOT_S, E2E_S = 10.0, 0.05, 30.0  # section 5.1
PROMPT, OUTPUT = Printed(250, 1200), (Printed(200, 700), Printed(300, 800))  # chat and code, below 2k tokens
CHAT, CODE = range(2)


def config(quick: bool) -> dict[str, Any]:
    if quick:
        return {"gpu": GPU, "counts": [5, 10], "limits": [1, 4], "draws": 4, "seeds": [1]}
    return {"gpu": GPU, "counts": [4, 6, 10, 20, 40], "limits": [1, 2, 4], "draws": 2, "seeds": [1, 2, 3]}


def tasks(config: dict[str, Any]) -> list[Task]:
    common = {name: config[name] for name in ("gpu", "draws", "seeds")}
    return [
        Task(f"{count} requests, limit {most}", {**common, "count": count, "most": most})
        for count in config["counts"]
        for most in config["limits"]
    ]


def drawn_jobs(count: int, seed: int) -> np.ndarray:
    """``count`` requests at time 0, chat and code alike; policies are told a length drawn from each task's Gaussian
    (section 4.2)."""
    rng, jobs = np.random.default_rng(seed), make_jobs(count)
    kinds = rng.permutation(np.arange(count) % 2)
    jobs["best_effort"], jobs["cap_tokens"], jobs["tier"] = False, 2048, kinds
    jobs["prompt_tokens"] = PROMPT.draw(rng, count)
    for kind in (CHAT, CODE):
        own, known = kinds == kind, OUTPUT[kind].draw(rng, 500)
        jobs["output_tokens"][own] = OUTPUT[kind].draw(rng, own.sum())
        guessed = rng.normal(known.mean(), known.std(), own.sum())
        jobs["predicted_tokens"][own] = np.clip(np.rint(guessed), 16, 2048)
    jobs["ttft_s"][kinds == CHAT], jobs["tpot_s"][kinds == CHAT] = TTFT_S, TPOT_S
    jobs["e2e_s"][kinds == CODE] = E2E_S
    return jobs


def measured(policy: str, jobs: np.ndarray, most: int, gpu: str, seed: int) -> tuple[float, np.ndarray]:
    """G (equation 2) of a run on an engine with ``most`` sequences whose iterations stray, and its records."""
    system = replace(System(policy, policy, max_running=most), straying=NOISES["noise10"])
    profile = load_profile(gpu)
    simulation = Simulation(jobs, system.engines(profile, seed), system.dispatcher(profile, jobs, seed))
    simulation.run()
    met = attained(simulation.jobs, simulation.records)["mean_tpot"]
    return float(met.sum() / simulation.records["last_s"].sum()), simulation.records


def of_exhaustive(jobs: np.ndarray, most: int, gpu: str, seed: int) -> float:
    """Objective of the annealed plan over that of the best plan, both by predictions."""
    profile = load_profile(gpu)
    engine = EngineModel(profile.coefficients, make_limits(profile.kv_capacity_tokens, max_running=most))
    asked = predicted_jobs(engine, to_rows(jobs, np.arange(len(jobs))), 0.0, 0, 0.0)
    best = best_plan(asked, most)[1]
    return anneal(asked, most, seed)[1] / best if best > 0 else 1.0


def run(params: Mapping[str, Any], context: Context) -> Point:
    count, most, gpu = params["count"], params["most"], params["gpu"]
    gains: dict[str, list[float]] = {"annealing": [], "annealing, true lengths": [], "edf": [], "sjf": []}
    searched = []
    for seed in params["seeds"]:
        for draw in range(params["draws"]):
            own = 1000 * seed + draw
            jobs = drawn_jobs(count, own)
            known = jobs.copy()
            known["predicted_tokens"] = known["output_tokens"]
            plain, _ = measured("vllm", jobs, most, gpu, own)
            if count <= MOST_JOBS:
                searched.append(of_exhaustive(jobs, most, gpu, own))
            if plain > 0.0:
                for name, found in gains.items():
                    asked = known if name.endswith("true lengths") else jobs
                    found.append(measured(name.partition(",")[0], asked, most, gpu, own)[0] / plain - 1.0)
    shares = {name: {"mean": float(np.mean(f)), "low": min(f), "high": max(f)} for name, f in gains.items() if f}
    return {"count": count, "most": most, "of_exhaustive": searched, "gain_over_fcfs": shares}


def behaves(params: Mapping[str, Any], context: Context) -> str:
    """What the policies do with one draw now."""
    jobs, digest = drawn_jobs(params["count"], 7), hashlib.blake2b(digest_size=8)
    for policy in ("annealing", "edf", "sjf", "vllm"):
        digest.update(measured(policy, jobs, params["most"], params["gpu"], 7)[1].tobytes())
    return digest.hexdigest()


def headline(points: Sequence[Point]) -> dict[str, float]:
    searched = [value for point in points for value in point["of_exhaustive"]]
    means = [point["gain_over_fcfs"]["annealing"]["mean"] for point in points if point["gain_over_fcfs"]]
    found = {"gain_over_fcfs": float(np.mean(means)), "gain_over_fcfs_max": max(means)} if means else {}
    if searched:
        found |= {"of_exhaustive_min": min(searched), "of_exhaustive_mean": float(np.mean(searched))}
    return {name: round(value, 4) for name, value in found.items()}


def tables(points: Sequence[Point]) -> str:
    rows = []
    for p in points:
        gains = [f"{100 * g['mean']:+.1f} %" for g in p["gain_over_fcfs"].values()]
        least = min(p["of_exhaustive"]) if p["of_exhaustive"] else "too many plans"
        rows.append([p["count"], p["most"], f"{least:.4f}" if isinstance(least, float) else least, *gains])
    names = list(points[0]["gain_over_fcfs"])
    header = ("requests", "batch limit", "of exhaustive search (least)", *(f"G over FCFS: {name}" for name in names))
    return markdown_table(header, rows)


ANNEALING = register(Experiment("annealing", "Annealing", config, tasks, run, headline, tables, behaves))
