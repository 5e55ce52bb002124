"""The scenario of ``fleet_flip`` in virtual time, for many rates and seeds: which goodput each system reaches.

    python -m benchmarks.fleet_flip_virtual --json docs/results/fleet-virtual.json

The live controller's ``Fleet`` decides over modelled engines of the same profile, requests and settings; no HTTP, Serve
or Ray, and no machine that is shared. Goodput is the rate up to which every tier attains 90 % in both halves.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.fleet_flip import MIXES, REPLICAS, ROOT, SYSTEMS, TIERS, slowed_profile
from benchmarks.result_file import write_result
from controller.options import FleetOptions
from controller.scaling.allocation import AllocationOptions
from controller.scaling.tiers import Tier, TierTable
from profiles.profile import Profile
from profiles.store import load_profile
from serving.loadgen.trace import Trace, read_trace
from simulation.core.jobs import make_jobs
from simulation.core.loop import Simulation
from simulation.dispatchers.live_fleet import ControllerDispatcher
from simulation.studies.systems import System as Engines
from simulation.workloads.settings import ServiceClass, ShareChange, draw_classes, set_classes

ATTAINED = 0.9
LENGTH_SCALE, IDLE_S, MAX_HOPS = 0.25, 3.0, 8  # as in ``fleet_flip``
BATCHES = {"scheduler": "slo", "max_num_batched_tokens": 2048}  # the configuration's defaults
MAX_RUNNING = 64


def main() -> None:
    """Parse, run every system at every rate and seed, write and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=ROOT.parent / "shared/traces/azure_2023_conv.parquet")
    parser.add_argument("--rate-scales", type=float, nargs="+", default=np.arange(1.5, 6.1, 0.5).tolist())
    parser.add_argument("--duration", type=float, default=80.0, help="seconds of arrivals; the mix flips halfway")
    parser.add_argument("--tight-ms", type=float, nargs="+", default=[80.0], help="TPOT of the tight tier")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--systems", nargs="+", choices=sorted(SYSTEMS), default=list(SYSTEMS))
    parser.add_argument("--json", type=Path, help="result file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        profile = load_profile(slowed_profile(Path(folder)))
    trace, points = read_trace(options.trace), list[dict[str, Any]]()
    for tight_ms in options.tight_ms:
        for system in options.systems:
            own = sweep(system, tight_ms, trace, profile, options)
            points += own
            print(f"TPOT {tight_ms:g} ms, {system}: {goodput_per_s(own):.1f} requests/s", flush=True)
    if options.json:
        write(options, points)


def sweep(
    system: str, tight_ms: float, trace: Trace, profile: Profile, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """A system at rising rates, until one is too much for it."""
    points: list[dict[str, Any]] = []
    for scale in sorted(options.rate_scales):
        for seed in options.seeds:
            jobs, is_after = requests(trace.scaled(scale, LENGTH_SCALE), options.duration, tight_ms, seed)
            shares = run(system, jobs, is_after, tight_ms, profile, seed)
            rate_per_s = float((~jobs["best_effort"]).sum() / options.duration)
            points.append({"system": system, "tight_ms": tight_ms, "scale": scale, "seed": seed,
                           "rate_per_s": rate_per_s, **shares})  # fmt: skip
        if not holds(points, scale):
            break
    return points


def tiers_at(tight_ms: float) -> list[dict[str, Any]]:
    """The tiers of ``fleet_flip``, the tightest with another TPOT."""
    return [{**TIERS[0], "tpot_ms": tight_ms}, *TIERS[1:]]


def requests(trace: Trace, duration_s: float, tight_ms: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Jobs of the trace's beginning, and which of them arrive after the flip."""
    count = int(np.searchsorted(trace.arrival_s, duration_s))
    jobs = make_jobs(count)
    jobs["arrival_s"] = trace.arrival_s[:count]
    jobs["prompt_tokens"], jobs["output_tokens"] = trace.input_tokens[:count], trace.output_tokens[:count]
    is_after = jobs["arrival_s"] >= duration_s / 2
    before, after = (tuple(mix.values()) for mix in MIXES.values())
    classes = [
        ServiceClass(
            tier["name"],
            share,
            tier.get("ttft_ms", np.inf) / 1000,
            tier.get("tpot_ms", np.inf) / 1000,
            best_effort=bool(tier.get("best_effort")),
        )
        for tier, share in zip(tiers_at(tight_ms), before, strict=True)
    ]
    change = ShareChange(1.0 - float(is_after.mean()), after)
    set_classes(jobs, classes, draw_classes(np.random.default_rng(seed), count, classes, [change]))
    return jobs, is_after


def run(
    system: str, jobs: np.ndarray, is_after: np.ndarray, tight_ms: float, profile: Profile, seed: int
) -> dict[str, float]:
    """Share of requests with every token on time, per tier and half."""
    how = SYSTEMS[system]
    batches = {**BATCHES, **how.engine}
    engines = Engines(
        system, batches["scheduler"], token_budget=batches["max_num_batched_tokens"], max_running=MAX_RUNNING,
        replicas=REPLICAS,
    )  # fmt: skip
    options = FleetOptions(max_hops=MAX_HOPS, seed=seed, allocation=AllocationOptions(idle_s=IDLE_S), **how.fleet)
    table = tier_table(system, jobs, tight_ms)
    simulation = Simulation(jobs, engines.engines(profile, seed), ControllerDispatcher(profile, table, options))
    simulation.run()
    attains = ~simulation.records["missed"] & (simulation.records["late_tokens"] == 0)
    return {
        f"{tier['name']}, {half}": float(attains[(jobs["tier"] == number) & (is_after == (half == "after"))].mean())
        for half in MIXES
        for number, tier in enumerate(TIERS)
        if not tier.get("best_effort")
    }


def tier_table(system: str, jobs: np.ndarray, tight_ms: float) -> TierTable:
    """Tiers under the names that ``ControllerDispatcher`` uses; lengths are known by the mean of all requests."""
    output_tokens, stated = int(jobs["output_tokens"].mean()), SYSTEMS[system].tier
    made = [
        Tier(
            f"tier {number}",
            tier.get("ttft_ms", np.inf) / 1000,
            tier.get("tpot_ms", np.inf) / 1000,
            best_effort=bool(tier.get("best_effort")),
            num_replicas=0 if tier.get("best_effort") else stated.get("num_replicas", 0),
            min_replicas=0 if tier.get("best_effort") else stated.get("min_replicas", 0),
            output_tokens=output_tokens,
        )
        for number, tier in enumerate(tiers_at(tight_ms))
    ]
    return TierTable.of(1, made)


def worst(point: dict[str, Any]) -> float:
    """Attainment of the tier and half that fared worst."""
    return float(min(share for name, share in point.items() if ", " in name))


def holds(points: list[dict[str, Any]], scale: float) -> bool:
    """Whether every tier attains at this rate, in the median of the seeds."""
    return bool(np.median([worst(point) for point in points if point["scale"] == scale]) >= ATTAINED)


def goodput_per_s(points: list[dict[str, Any]]) -> float:
    """Requests per second at the highest rate that holds, as do all lower ones; 0 where none does."""
    best = 0.0
    for scale in sorted({point["scale"] for point in points}):
        if not holds(points, scale):
            break
        best = float(np.mean([point["rate_per_s"] for point in points if point["scale"] == scale]))
    return best


def write(options: argparse.Namespace, points: list[dict[str, Any]]) -> None:
    """The result file."""
    config = {key: value.name if isinstance(value, Path) else value for key, value in vars(options).items()}
    headline = {
        f"goodput_per_s_{system}_{tight_ms:g}ms": goodput_per_s(
            [p for p in points if (p["system"], p["tight_ms"]) == (system, tight_ms)]
        )
        for tight_ms in options.tight_ms
        for system in options.systems
    }
    write_result(
        options.json, "fleet_flip_virtual", config=config, seeds=options.seeds, headline=headline, points=points
    )


if __name__ == "__main__":
    main()
