"""``programs_live`` in virtual time: the same sessions, caches and deadlines on modelled engines of a CPU.

    python -m benchmarks.programs_virtual [--slowdowns 1 1.5 2] [--rates 0.35 0.5] [--seeds 1 2 3] [--json OUT]

Nothing but the engines takes time. With a slowdown they take so many times as long as their profile says, as where
processes share cores; deadlines are still multiples of what the profile says. Planners learn the speed as they go.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.main_job import ROOT
from benchmarks.program_sessions import IdleSpeed, LiveLoad
from benchmarks.programs_live import HISTORY_LOAD, OURS, Sessions
from benchmarks.result_file import write_result
from profiles.profile import Profile
from profiles.store import load_profile
from simulation.core.jobs import NEVER
from simulation.experiments.program_systems import OURS as OURS_SIMULATED
from simulation.experiments.program_systems import SYSTEMS
from simulation.experiments.programs import cached_share, in_time, promised_of, simulate
from simulation.studies.systems import NOISES

PROFILE = "embedded-cpu"
ALONE = IdleSpeed(0.01, 1.5e-4, 1e-5, 7.6e-8, 4.2e-3, 5.7e-7)  # about what ``programs_live`` measures
KV_TOKENS, BUDGET, BLOCK_TOKENS = 26_000, 2048, 16
RIVALS = ("vllm-affinity", "lmetric", "plas", "tempo", "concord")


def main() -> None:
    """Play every combination, write and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=ROOT.parent / "shared/traces/agentic_coding_a.parquet")
    parser.add_argument("--systems", nargs="+", choices=[OURS, *RIVALS], default=[OURS, *RIVALS])
    parser.add_argument("--slowdowns", type=float, nargs="+", default=[1.0, 1.5, 2.0])
    parser.add_argument("--rates", type=float, nargs="+", default=[0.35, 0.5], help="programs a second")
    parser.add_argument("--scale", type=float, default=4.0, help="of deadlines")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--programs", type=int, default=30)
    parser.add_argument("--steps-in-flight", type=int, choices=[1, 2], default=1, help="of the modelled engines")
    parser.add_argument("--length-scale", type=float, default=1 / 32)
    parser.add_argument("--tool-scale", type=float, default=1 / 16)
    parser.add_argument("--longest-s", type=float, default=45.0, help="critical path of a session on idle engines")
    parser.add_argument("--json", type=Path, help="result file")
    options = parser.parse_args()
    if not options.trace.exists():
        parser.exit(2, f"--trace: no file {options.trace}; it comes with the project's data, not with a clone\n")
    sessions, points = Sessions(options), list[dict[str, Any]]()
    sessions.keep_short(ALONE)
    print("| slowdown | programs a second | system | in time | promised at first and in time | kept | cached |")
    print("|---" * 7 + "|")
    for slowdown in options.slowdowns:
        for per_s in options.rates:
            for system in options.systems:
                own = [play(system, seed, per_s, slowdown, sessions) for seed in options.seeds]
                points += own
                print(line(own), flush=True)
    if options.json:
        config = {key: value.name if isinstance(value, Path) else value for key, value in vars(options).items()}
        write_result(options.json, "programs_virtual", config=config, seeds=options.seeds, headline={}, points=points)


def play(system: str, seed: int, per_s: float, slowdown: float, sessions: Sessions) -> dict[str, Any]:
    """One run: shares of all programs."""
    name = OURS_SIMULATED if system == OURS else system
    known = replace(SYSTEMS[name], budget=BUDGET)
    live, blocks = with_blocks(sessions.programs(seed, per_s), BLOCK_TOKENS)
    past = sessions.programs(seed, HISTORY_LOAD * per_s, True).load
    profile, scale = engine(), sessions.options.scale
    straying = replace(NOISES["noise10"], slowdown=slowdown, steps_in_flight=sessions.options.steps_in_flight)
    simulation = simulate(known, live.load, past, scale, {
        "profile": profile, "replicas": 2, "seed": seed, "scales": [scale], "blocks": blocks,
        "block_tokens": BLOCK_TOKENS, "straying": straying,
    })  # fmt: skip
    met = in_time(simulation, live.load.deadlines_s(profile.coefficients, scale))
    first = known.admits & promised_of(known, simulation, np.unique(live.load.jobs["program"]))
    return {
        "system": system, "slowdown": slowdown, "per_s": per_s, "seed": seed, "in_time": float(met.mean()),
        "promised_first": float(first.mean()), "on_time": float((met & first).mean()),
        "cached": cached_share(simulation),
    }  # fmt: skip


def engine() -> Profile:
    """The CPU's, with the KV cache of ``programs_live``."""
    return replace(load_profile(PROFILE), kv_capacity_tokens=KV_TOKENS)


def with_blocks(live: LiveLoad, block_tokens: int) -> tuple[LiveLoad, np.ndarray]:
    """The programs with prefix blocks as their live prompts have them, and those blocks' ids (i8[b]): a conversation's,
    outputs as well, and new ones."""
    jobs, held, ids, known = live.load.jobs.copy(), dict[int, list[int]](), list[int](), 0
    for job in live.load.in_order(live.load.calls_before()):
        prompt_tokens, output_tokens = int(jobs["prompt_tokens"][job]), int(jobs["output_tokens"][job])
        prompt, whole = prompt_tokens // block_tokens, (prompt_tokens + output_tokens) // block_tokens
        old = held[live.continued[job]][:prompt] if live.continued[job] != NEVER else []
        held[job] = old + list(range(known, known + whole - len(old)))
        known += whole - len(old)
        jobs["first_block"][job], jobs["blocks"][job] = len(ids), prompt
        ids += held[job][:prompt]
    return replace(live, load=replace(live.load, jobs=jobs)), np.array(ids, dtype=np.int64)


def line(own: Sequence[Mapping[str, Any]]) -> str:
    """A row of the table: means over the seeds."""
    mean = {name: float(np.mean([point[name] for point in own])) for name in ("in_time", "on_time", "cached")}
    promised, first = sum(point["promised_first"] for point in own), own[0]
    kept = f"{sum(point['on_time'] for point in own) / promised:.2f}" if promised else ""
    on_time = f"{mean['on_time']:.2f}" if promised else ""
    return (
        f"| {first['slowdown']:g} | {first['per_s']:g} | {first['system']} | {mean['in_time']:.2f} | {on_time} "
        f"| {kept} | {mean['cached']:.2f} |"
    )


if __name__ == "__main__":
    main()
