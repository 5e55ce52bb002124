"""``engine_slo`` in virtual time: the same traffic and policies on one modelled engine, in seconds instead of hours.

    python -m benchmarks.engine_slo_virtual [--loads 1.0,1.2] [--seeds 8] [--option best_effort_share=0.1] [--json OUT]

Nothing here takes time but the iterations: no front end, no second step in flight, no way that tokens travel. Seeds,
classes, multiples of the time alone, grace and the measurement of capacity are those of ``benchmarks.engine_slo``.
Where ``--tight-tpot-times`` has several values, the first is quoted, and of the others what best effort gets.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.engine_figures import STOCK, headline, suffix_of, to_rich
from benchmarks.engine_runs import CAPACITY_SEED, GRACE_S, GRACE_TIMES
from benchmarks.engine_traffic import GPU_CLASSES, Class, Job, make_jobs, middle_rate, to_slos
from benchmarks.pressure import TakeAll
from benchmarks.result_file import write_result
from profiles.profile import Profile
from profiles.store import load_profile
from protocol.messages import LIVE_STRETCH, Slo
from simulation.core.jobs import make_jobs as job_table
from simulation.core.loop import Simulation
from simulation.core.straying import learn_from
from simulation.studies.systems import System

BURST = 720  # requests of the capacity measurement
TOKEN_BUDGETS = {"sarathi": 1024}  # the best of five in both runs of ``engine_slo``


class Until(TakeAll):
    """Takes everything, and has the run looked at when it is to end."""

    def __init__(self, until_s: float) -> None:
        self.until_s = until_s

    def next_wake_s(self) -> float:
        return self.until_s


class Engine:
    """One modelled engine, made anew for every run."""

    def __init__(self, profile: Profile, spread: float, options: dict[str, float]) -> None:
        self.profile, self.spread, self.options = profile, spread, options

    def run(self, policy: str, jobs: list[Job], until_s: float, seed: int) -> Simulation:
        """Play ``jobs`` until ``until_s``."""
        budget = TOKEN_BUDGETS.get(policy, 8192)
        system = System(policy, policy=policy, token_budget=budget, best_effort_stretch=LIVE_STRETCH)
        engines = system.engines(self.profile, seed)
        for name, value in self.options.items() if policy == "slo" else ():
            engines.limits[name] = value
        if self.spread:
            engines.state["sigma"], engines.state["guards"] = self.spread, True
            learn_from(engines, np.array(self.profile.coefficients))
        simulation = Simulation(to_table(jobs), engines, Until(until_s))
        simulation.run(lambda running: running.now_s >= until_s)
        return simulation

    def alone(self, kind: Class) -> tuple[float, float]:
        """TTFT and TPOT of a middling request of the class that has the engine to itself, seconds."""
        prompt, output = (sum(sizes) // 2 for sizes in (kind.prompt_tokens, kind.output_tokens))
        job = Job(kind, Slo(best_effort=True), 0.0, [0] * prompt, output)
        record = Engine(self.profile, 0.0, {}).run(STOCK, [job], 60.0, 0).records[0]
        return float(record["first_s"]), float((record["last_s"] - record["first_s"]) / (output - 1))

    def capacity(self, slos: dict[str, Slo]) -> float:
        """Requests per second that vLLM's order finishes in the middle third of a burst."""
        burst = make_jobs(1e4, 1.0, slos, CAPACITY_SEED, GPU_CLASSES)[:BURST]
        records = self.run(STOCK, burst, 240.0, 0).records
        return middle_rate(records["last_s"][records["ended"]].tolist())


def to_table(jobs: list[Job]) -> np.ndarray:
    """The simulator's jobs (JOB[n]); output lengths are known, as ``engine_slo`` tells them."""
    table = job_table(len(jobs))
    for row, job in zip(table, jobs, strict=True):
        row["arrival_s"], row["prompt_tokens"] = job.arrival_s, len(job.prompt)
        for name in ("output_tokens", "predicted_tokens", "cap_tokens"):
            row[name] = job.max_tokens
        if not job.slo.best_effort:
            row["ttft_s"], row["tpot_s"], row["best_effort"] = job.slo.ttft_s, job.slo.tpot_s, False
    return table


def summarize(jobs: list[Job], simulation: Simulation, took_s: float) -> dict[str, float]:
    """What ``engine_traffic.summarize`` tells of a run, from records."""
    records, table = simulation.records, simulation.jobs
    spare, emitted = table["best_effort"], records["emitted_tokens"]
    attained, prompts = records["ended"] & ~records["missed"], table["prompt_tokens"] * (records["emitted_tokens"] > 0)
    result = {
        "attained": float(attained[~spare].mean()),
        "tokens_per_s": float((emitted + prompts).sum() / took_s),
        "best_effort_tokens": float(emitted[spare].sum()),
        "best_effort_finished": float(records["ended"][spare].sum()),
        "requests": float(len(jobs)),
        "machine_load": 0.0,
        "preemptions": float(simulation.engines.state["preemptions"].sum()),
        "iterations": float(simulation.engines.state["iterations"].sum()),
    }
    kinds = np.array([job.kind.name for job in jobs])
    return result | {f"attained {name}": float(attained[kinds == name].mean()) for name in set(kinds[~spare].tolist())}


def measure(engine: Engine, tpot_times: float, asked: argparse.Namespace) -> tuple[float, list[dict[str, Any]]]:
    """Capacity, and one point per load, policy and seed."""
    classes = (replace(GPU_CLASSES[0], tpot_times=tpot_times), *GPU_CLASSES[1:])
    alone = {kind.name: engine.alone(kind) for kind in classes}
    slos = to_slos(alone, classes)
    longest_s = max(alone[kind.name][0] + kind.output_tokens[1] * alone[kind.name][1] for kind in classes)
    grace_s, capacity, points = max(GRACE_S, GRACE_TIMES * longest_s), engine.capacity(slos), list[dict[str, Any]]()
    for seed in range(asked.seeds):
        for load in map(float, asked.loads.split(",")):
            for policy in (STOCK, "sarathi", "slo"):
                jobs = make_jobs(capacity * load, asked.seconds, slos, seed, classes)
                until_s = asked.seconds + grace_s
                simulation = engine.run(policy, jobs, until_s, seed)
                took_s = until_s if simulation.left else float(simulation.records["last_s"].max())
                at = {"policy": policy, "load": load, "seed": seed, "tight_tpot_times": tpot_times}
                points.append({**at, **summarize(jobs, simulation, took_s)})
    return capacity, points


def main() -> None:
    """Parse, run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="result file")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=20.0, help="window of arrivals")
    parser.add_argument("--loads", default="0.7,0.85,1.0,1.2,1.5", help="shares of the capacity")
    parser.add_argument("--profile", default="h200_sxm__llama-3.1-8b")
    parser.add_argument("--spread", type=float, default=0.1, help="sigma by which iterations differ from the profile")
    parser.add_argument("--tight-tpot-times", default="4", help="TPOT of the tight class over what it takes alone")
    parser.add_argument("--option", action="append", default=[], help="NAME=VALUE of the planner's limits")
    asked, console = parser.parse_args(), Console(width=160)
    options = {name: float(value) for name, value in (each.split("=") for each in asked.option)}
    engine, suffix = Engine(load_profile(asked.profile), asked.spread, options), suffix_of("timed", asked.profile)
    times = [float(each) for each in asked.tight_tpot_times.split(",")]
    capacity, points = measure(engine, times[0], asked)
    figures = headline(points, capacity, suffix)
    console.print(to_rich(points), f"capacity {capacity:.1f}/s")
    quoted = [name for name in figures if name.startswith("best_effort_tokens_ratio_at_")]
    for other in times[1:]:
        looser = measure(engine, other, asked)[1]
        found = headline(looser, capacity, suffix)
        figures |= {f"{name}_tpot_x{other:g}": found[name] for name in quoted}
        points += looser
    console.print(figures)
    if asked.json:
        config = {**{name: value for name, value in vars(asked).items() if name != "json"}, "capacity_per_s": capacity}
        write_result(
            asked.json, "engine_slo_virtual", config=config, seeds=range(asked.seeds), headline=figures, points=points
        )


if __name__ == "__main__":
    main()
