"""SLO attainment of one real vLLM engine under different batch policies, interleaved on the same engine.

    python -m benchmarks.engine_slo [--quick] [--device timed [--profile NAME]] [--json OUT]

A mix of tight, loose and best-effort requests arrives open loop at shares of the engine's capacity. Objectives are
multiples of what each class measures when it has the engine to itself, so that they mean the same on any machine. The
policies take turns on one engine process (they change at run time), every one with the same arrivals; there is no
admission control here. Requests that have not finished when the window and its grace end count as missed. The engine
is a CPU, or a timed device that takes as long as a GPU would. What a step costs is measured beside it
(``benchmarks.engine_steps``), always over a timed device.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from benchmarks.engine_figures import POLICIES, headline, step_headline, suffix_of, to_rich
from benchmarks.engine_runs import CROWD, Bench, measure_shaping
from benchmarks.engine_traffic import to_slos
from benchmarks.result_file import write_result
from protocol.messages import Slo
from replicas.config import ReplicaConfig

LOADS = (0.6, 0.8, 1.0, 1.2, 1.5)
# One seed, within five minutes. Queues take longer to grow than so short a window.
QUICK_LOADS, QUICK_SECONDS = {"auto": (0.7, 1.0, 1.5), "timed": (0.8, 1.0, 1.3)}, 10.0
STEP_CROWDS, STEP_TURNS, QUICK_TURNS = (256, 1024), 24, 8


class Plan(NamedTuple):
    """What is run."""

    loads: tuple[float, ...]
    seeds: int
    seconds: float
    options: dict[str, float]  # of the planner
    quick: bool


def read_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="result file")
    parser.add_argument("--quick", action="store_true", help="fewer loads, one seed: within five minutes")
    parser.add_argument("--seeds", type=int, default=5, help="runs per load and policy")
    parser.add_argument("--seconds", type=float, default=15.0, help="window of arrivals")
    parser.add_argument("--loads", default=",".join(map(str, LOADS)), help="shares of the capacity")
    parser.add_argument("--max-iteration-s", type=float, default=0.2, help="the planner's cap on one iteration")
    parser.add_argument(
        "--best-effort-stretch", type=float, default=8.0, help="how far best effort may prolong an iteration"
    )
    parser.add_argument("--core", type=int, default=-1, help="core of the engine; -1: any free one")
    parser.add_argument("--device", choices=("auto", "timed"), default="auto", help="timed: as long as a profile says")
    parser.add_argument("--profile", default="h200_sxm__llama-3.1-8b", help="of the timed device")
    parser.add_argument("--steps-in-flight", type=int, default=2, help="of the timed device; 1: synchronous scheduling")
    parser.add_argument("--spread", type=float, default=0.1, help="sigma by which the timed device differs from it")
    parser.add_argument("--speed", type=float, default=1.0, help="of the timed device, times the profile's")
    parser.add_argument("--shaping", action="store_true", help="only the cost of a step, 256 requests running")
    return parser.parse_args()


def plan_of(given: argparse.Namespace) -> Plan:
    """The loads, seeds and seconds that are asked for."""
    options = {"max_iteration_s": given.max_iteration_s, "best_effort_stretch": given.best_effort_stretch}
    if given.quick:
        return Plan(QUICK_LOADS[given.device], 1, QUICK_SECONDS, options, quick=True)
    return Plan(tuple(map(float, given.loads.split(","))), given.seeds, given.seconds, options, quick=False)


def config_of(given: argparse.Namespace) -> ReplicaConfig:
    """The engine."""
    common: dict[str, Any] = dict(enable_prefix_caching=False, max_num_seqs=CROWD, device=given.device)
    common["cores"] = (given.core,) if given.core >= 0 else ()
    if given.device != "timed":
        return ReplicaConfig(**common, max_model_len=2048)
    gpu: dict[str, Any] = dict(
        profile=given.profile,
        steps_in_flight=given.steps_in_flight,
        iteration_spread=given.spread,
        speed=given.speed,
    )
    return ReplicaConfig(**common, **gpu, max_model_len=8192, max_num_batched_tokens=8192)


async def choose_chunk(bench: Bench, capacity: float, slos: dict[str, Slo], seconds: float) -> int:
    """Sarathi's best budget at full load, on arrivals that are not used again; the only one without a run."""
    if len(bench.chunks) == 1:
        return bench.chunks[0]
    attained = {}
    for chunk in bench.chunks:
        await bench.engine.configure("sarathi", {"token_budget": chunk})
        attained[chunk] = (await bench.run_undisturbed(capacity, seconds, slos, seed=10_000))["attained"]
    return max(bench.chunks, key=lambda chunk: attained[chunk])


async def measure(config: ReplicaConfig, plan: Plan, console: Console) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """All runs; returns what was measured beforehand and one record per run."""
    bench = Bench(config, plan.quick)
    await bench.engine.start()
    try:
        alone = await bench.measure_alone()
        slos = to_slos(alone, bench.classes)
        capacity = await bench.measure_capacity(slos)
        chunk = await choose_chunk(bench, capacity, slos, plan.seconds)
        setting = {
            "alone": alone,
            "grace_s": bench.grace_s,
            "capacity_per_s": capacity,
            "sarathi_token_budget": chunk,
            "classes": [vars(kind) for kind in bench.classes],
            **await bench.measure_planning(),
        }
        console.print(setting, {name: (slo.ttft_s, slo.tpot_s) for name, slo in slos.items()})
        per_policy = {"sarathi": {"token_budget": float(chunk)}, "slo": plan.options}
        points = []
        for seed in range(plan.seeds):
            for load in plan.loads:
                for turn in range(len(POLICIES)):
                    policy = POLICIES[(turn + seed) % len(POLICIES)]
                    await bench.engine.configure(policy, per_policy.get(policy, {}))
                    result = await bench.run_undisturbed(capacity * load, plan.seconds, slos, seed)
                    points.append({"policy": policy, "load": load, "seed": seed, **result})
                    console.print(f"seed {seed} load {load} {policy}: {points[-1]['attained']:.3f}")
        return setting, points
    finally:
        await bench.engine.stop()


def measure_costs(profile: str, core: int, turns: int) -> list[dict[str, Any]]:
    """What a step costs, by the number of requests running."""
    from benchmarks.engine_steps import measure_steps

    return asyncio.run(measure_steps(profile, STEP_CROWDS, core, turns))


def main() -> None:
    """Compare policies on the embedded model, or on a GPU that a timed device stands for."""
    given, console, began_s = read_options(), Console(width=160), time.monotonic()
    config, plan = config_of(given), plan_of(given)
    if given.shaping:
        console.print(asyncio.run(measure_shaping(config)))
        return
    steps = measure_costs(given.profile, given.core, QUICK_TURNS if plan.quick else STEP_TURNS)
    console.print(steps)
    setting, points = asyncio.run(measure(config, plan, console))
    console.print(to_rich(points))
    suffix = suffix_of(given.device, given.profile)
    figures = headline(points, setting["capacity_per_s"], suffix) | step_headline(steps, suffix)
    figures |= {f"{name}{suffix}": value for name, value in setting.items() if name.startswith("shaping_us")}
    console.print(figures, f"{time.monotonic() - began_s:.0f} s")
    if given.json:
        asked = {name: value for name, value in vars(given).items() if name not in ("json", "shaping")}
        described = {**asked, **plan._asdict(), **setting, "steps": steps}
        seeds = range(plan.seeds)
        write_result(given.json, "engine_slo", config=described, seeds=seeds, headline=figures, points=points)


if __name__ == "__main__":
    main()
