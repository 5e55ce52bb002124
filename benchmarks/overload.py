"""Ten times more than the fleet can do, on the live stack: promises kept, refusals at once, and times that hold.

    python -m benchmarks.overload [--quick] [--json OUT]

HTTP, HAProxy, Serve, Ray, ingress and controller are real. Engines are simulated and so slow that ten times their
capacity is less than 100 requests/s, which leaves the machine's cores to the stack. Capacity is the rate at which 90 %
are admitted and on time in virtual time (``benchmarks.retry``). Refused clients come back when told, each time anew,
but at ten times capacity, where they would make it twenty. *round-robin* is the same stack that checks nothing, over
engines with vLLM's own scheduler. Systems take turns, each on a fresh stack.
"""

import argparse
import contextlib
import os
import statistics
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from rich.console import Console

from benchmarks.front_path import cpu_seconds, processes, waited_seconds
from benchmarks.local_stack import serve_document, serving_stack
from benchmarks.result_file import write_result
from benchmarks.retry import Scene, capacity_per_s, requests
from serving.ingress.errors import RETRY_AFTER_CAP_S
from serving.launch.kernels import compile_kernels
from serving.loadgen.client import Record, Status
from serving.loadgen.mix import SloClass
from serving.loadgen.replay import Replay, ReplayOptions, replay
from serving.loadgen.trace import Trace
from simulation.workloads.settings import ServiceClass

SCENE = Scene(
    profile="h200_sxm__llama-3.1-8b",
    speed=0.1,
    replicas=4,
    max_running=16,
    classes=(ServiceClass("interactive", 0.5, 1.5, 0.2), ServiceClass("standard", 0.5, 4.0, 0.4)),
    prompt_tokens=(300, 2000),
    output_tokens=(80, 400),
)
CAPACITY_PER_S = 6.7  # of the scene, as --capacity 0 measures it
RETURNS_UP_TO = 2.0  # times capacity
TRANSIT_S = 0.03  # that a token may take on the shared cores of one machine; promises leave it that
SETTLE_S = 90.0
ENGINE = {"kind": "simulated", "num_cpus": 0.01, "max_num_batched_tokens": 2048}
SYSTEMS: dict[str, dict[str, dict[str, Any]]] = {
    "polyslo": {"engine": {}, "fleet": {"unattainable": "refuse"}},
    "round-robin": {"engine": {"scheduler": "vllm"}, "fleet": {"routing": "round_robin", "admission": False}},
}


def main() -> None:
    """Parse, run in turns, write and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 1.2, 1.5, 10.0], help="of the capacity")
    parser.add_argument("--capacity", type=float, default=CAPACITY_PER_S, help="requests per second; 0: measure it")
    parser.add_argument("--duration", type=float, default=120.0, help="seconds of arrivals at each load")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--systems", nargs="+", choices=sorted(SYSTEMS), default=list(SYSTEMS))
    parser.add_argument("--quick", action="store_true", help="20 s at 0.5, 1.5 and 10 times capacity")
    parser.add_argument("--json", type=Path, help="result file")
    options = parser.parse_args()
    if options.quick:
        options.duration, options.loads = 20.0, [0.5, 1.5, 10.0]
    console = Console(stderr=True)
    compile_kernels(console)
    options.capacity = options.capacity or capacity_per_s(60.0, (1, 2, 3), SCENE)
    points: list[dict[str, Any]] = []
    for seed in options.seeds:
        for system in options.systems:
            console.rule(f"{system}, seed {seed}")
            points += run(system, seed, options, console)
            if options.json:
                write(options, points)
    for line in table(points):
        print(line)
    print(headline(points))


def run(system: str, seed: int, options: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    """One system under every load on a fresh stack: one point per load."""
    how, points = SYSTEMS[system], []
    args = {
        "model": "embedded",
        "engine": {**ENGINE, "speed": SCENE.speed, "max_num_seqs": SCENE.max_running, **how["engine"]},
        "profile": SCENE.profile,
        "fleet": {"num_replicas": SCENE.replicas, **how["fleet"]},
        "ingress": {"transit_s": TRANSIT_S},
    }
    tiers = [{"name": c.name, "ttft_ms": 1e3 * c.ttft_s, "tpot_ms": 1e3 * c.tpot_s} for c in SCENE.classes]
    document = serve_document(args, [*tiers, {"name": "batch", "best_effort": True}])
    with serving_stack(document, SCENE.replicas, console, cpus=8) as url:
        play(url, 0.5 * options.capacity, 8.0, seed + 100, 0.0, console)  # warm-up, not counted
        for load in options.loads:
            settle(url)
            returns_s = RETRY_AFTER_CAP_S - 1.0 if load <= RETURNS_UP_TO else 0.0
            found, started_s = processes(), time.monotonic()
            before = cpu_seconds(found), waited_seconds(found)
            played = play(url, load * options.capacity, options.duration, seed, returns_s, console)
            after, lasted_s = (cpu_seconds(found), waited_seconds(found)), time.monotonic() - started_s
            known = {"system": system, "seed": seed, "load": load, "rate_per_s": load * options.capacity}
            for name, since, now in zip(("cores_busy", "cores_lacking"), before, after, strict=True):
                known[name] = {kind: round((now[kind] - since.get(kind, 0.0)) / lasted_s, 3) for kind in now}
            known["load_average"] = os.getloadavg()[0]
            points.append(known | figures(played, options.duration))
            console.print(points[-1] | {"classes": ""})
    return points


def play(url: str, rate_per_s: float, duration_s: float, seed: int, returns_s: float, console: Console) -> Replay:
    """Poisson arrivals of the scene's requests against a server."""
    jobs = requests(rate_per_s, duration_s, seed, SCENE)
    classes = [SloClass(c.name, 1.0, c.name, app=c.name) for c in SCENE.classes]
    by_ttft = {c.ttft_s: c.name for c in SCENE.classes}
    trace = Trace(
        "poisson",
        jobs["arrival_s"],
        jobs["prompt_tokens"].astype(np.int64),
        jobs["output_tokens"].astype(np.int64),
        [by_ttft[ttft_s] for ttft_s in jobs["ttft_s"].tolist()],
    )
    options = ReplayOptions(trace, url=url, slo_mix=tuple(classes), seed=seed, grace_s=30.0, return_within_s=returns_s)
    return replay(options, console)


def settle(url: str) -> None:
    """Wait until no replica has a request, at most ``SETTLE_S``."""
    give_up_s = time.monotonic() + SETTLE_S
    while time.monotonic() < give_up_s:
        with contextlib.suppress(httpx.HTTPError):
            told = httpx.get(f"{url}/polyslo/status", timeout=10).json()
            if not any(replica["requests"] for replica in told["replicas"]):
                return
        time.sleep(0.5)


def figures(played: Replay, duration_s: float) -> dict[str, Any]:
    """What is claimed of one load: promises, refusals, best effort, returns."""
    records = played.records
    refused = [record for record in records if record.status == Status.REFUSED]
    waits_ms = [1e3 * (record.end_s - record.sent_s) for record in refused]
    returned = [r for r in records if r.returns and r.due_s < duration_s and r.status != Status.UNFINISHED]
    told = [record.retry_after_s for record in refused]
    return {
        "classes": played.points,
        "refusal_ms": {f"p{q}": float(np.percentile(waits_ms, q)) if waits_ms else None for q in (50, 90, 99, 100)},
        "best_effort": sum(served_best_effort(record) for record in records),
        "best_effort_unsaid": sum(served_best_effort(r) and r.service_tier != "flex" for r in records),
        "returns": len(returned),
        "returns_admitted": sum(record.status != Status.REFUSED for record in returned),
        "told_cap": sum(seconds >= RETRY_AFTER_CAP_S for seconds in told),
        "told_none": sum(not np.isfinite(seconds) for seconds in told),
    }


def served_best_effort(record: Record) -> bool:
    """Whether a request, all of which ask for an objective, was served without one."""
    return record.status == Status.FINISHED and (record.slo is None or record.slo.admitted is False)


def headline(points: list[dict[str, Any]]) -> dict[str, float]:
    """Promises kept, the 99th percentile of a refusal's time, best effort, returns admitted; by load."""
    told: dict[str, float] = {}
    for load in sorted({point["load"] for point in points}):
        own = [p for p in points if (p["load"], p["system"]) == (load, "polyslo")]
        plain = [p for p in points if (p["load"], p["system"]) == (load, "round-robin")]
        at = f"{load:g}".replace(".", "_")
        kept = [(p["classes"][0]["promised"], p["classes"][0]["kept_share"] or 0.0) for p in own]
        if promised := sum(count for count, _ in kept):
            told[f"kept_{at}"] = sum(count * share for count, share in kept) / promised
        if slow := [p["refusal_ms"]["p99"] for p in own if p["refusal_ms"]["p99"] is not None]:
            told[f"refusal_ms_p99_{at}"] = statistics.median(slow)
        if returns := sum(p["returns"] for p in own):
            told[f"returns_admitted_{at}"] = sum(p["returns_admitted"] for p in own) / returns
        if own:
            told[f"best_effort_{at}"] = sum(p["best_effort"] for p in own)
        if own and plain:
            goodputs = [statistics.median(p["classes"][0]["goodput_per_s"] for p in each) for each in (own, plain)]
            told[f"goodput_per_s_{at}"], told[f"goodput_per_s_{at}_round_robin"] = goodputs
    return told


def table(points: list[dict[str, Any]]) -> list[str]:
    """One line per load and system, medians over the seeds."""
    lines = [
        "| load | system | asked | kept | attained/s | refused | P50, P99 of a refusal (ms) | best effort "
        "| returns admitted | told the cap |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for load, system in sorted({(point["load"], point["system"]) for point in points}):
        own = [point for point in points if (point["load"], point["system"]) == (load, system)]
        for point in own:
            whole, ms = point["classes"][0], point["refusal_ms"]
            kept = f"{whole['kept_share']:.3f} of {whole['promised']}" if whole["promised"] else "no promise"
            took = f"{ms['p50']:.0f}, {ms['p99']:.0f}" if ms["p50"] is not None else ""
            returns = f"{point['returns_admitted']} of {point['returns']}" if point["returns"] else ""
            lines.append(
                f"| {load:g} | {system} | {whole['requests']} | {kept} | {whole['goodput_per_s']:.2f} "
                f"| {whole['refused']} | {took} | {point['best_effort']} | {returns} | {point['told_cap']} |"
            )
    return lines


def write(options: argparse.Namespace, points: list[dict[str, Any]]) -> None:
    """The result file, rewritten after every run."""
    config = {key: value.name if isinstance(value, Path) else value for key, value in vars(options).items()}
    config |= {"profile": SCENE.profile, "speed": SCENE.speed, "replicas": SCENE.replicas, "systems": SYSTEMS}
    write_result(options.json, "overload", config=config, seeds=options.seeds, headline=headline(points), points=points)


if __name__ == "__main__":
    main()
