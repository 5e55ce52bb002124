"""Sixteen replicas on the real stack while the mix of tiers flips: one pool, roles that move, silos, and stock engines.

    python -m benchmarks.fleet_flip --trace ../shared/traces/azure_2023_conv.parquet --json OUT --plot OUT.png

HTTP, Serve, Ray, controller and the requests are real; engines are simulated, so that one machine holds sixteen. They
run the embedded model's profile slowed down, because the client, the ingress and all engines share the machine's cores.
"""

import argparse
import contextlib
import dataclasses
import json
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from rich.console import Console

from benchmarks.fleet_flip_report import SAMPLE_S, draw, lost, table, thinned, timeline, worst
from benchmarks.local_stack import serve_document as stack_document
from benchmarks.local_stack import serving_stack
from benchmarks.result_file import write_result
from profiles.store import load_profile
from serving.launch.kernels import compile_kernels
from serving.loadgen.mix import SloClass
from serving.loadgen.replay import Replay, ReplayOptions, replay
from serving.loadgen.trace import Trace, read_trace

ROOT = Path(__file__).resolve().parent.parent
TIERS: list[dict[str, Any]] = [
    {"name": "interactive", "ttft_ms": 2000, "tpot_ms": 80},
    {"name": "standard", "ttft_ms": 8000, "tpot_ms": 250},
    {"name": "batch", "best_effort": True},
]
MIXES = {
    "before": {"interactive": 0.75, "standard": 0.1, "batch": 0.15},
    "after": {"interactive": 0.1, "standard": 0.75, "batch": 0.15},
}
REPLICAS, SLOWER, WARM_UP_S = 16, 8.0, 8.0
TRANSIT_S = 0.03  # twenty processes share two cores: tokens came up to so much later than they were made


@dataclass(frozen=True)
class System:
    """How the same replicas are used: what each promising tier states, and settings that differ from the default."""

    tier: dict[str, int] = field(default_factory=dict)
    fleet: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)


HALF = {"num_replicas": REPLICAS // 2}
SYSTEMS = {
    "shared": System(),
    "roles": System({"min_replicas": 1}),
    "silos": System(HALF),
    # What an operator has today: vLLM's own batches, nothing checked, the best of budgets 64 to 2048 and of balancers.
    "stock-shared": System(
        fleet={"admission": False, "routing": "least_loaded"},
        engine={"scheduler": "vllm", "max_num_batched_tokens": 2048},
    ),
    "stock-silos": System(
        HALF,
        fleet={"admission": False, "routing": "silos"},
        engine={"scheduler": "vllm", "max_num_batched_tokens": 128},
    ),
}


@dataclass
class Watch:
    """Samples of the status page while a replay runs."""

    url: str
    samples: list[dict[str, Any]] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> "Watch":
        self._start_s = time.monotonic()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(10)

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            with contextlib.suppress(httpx.HTTPError):
                told = httpx.get(f"{self.url}/polyslo/status", timeout=5.0).json()
                replicas = [
                    {key: replica[key] for key in ("replica", "tier", "load", "requests")}
                    for replica in told["replicas"]
                ]
                self.samples.append({"at_s": round(time.monotonic() - self._start_s, 2), "replicas": replicas})


def main() -> None:
    """Parse, run every system once per seed, write and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=ROOT.parent / "shared/traces/azure_2023_conv.parquet")
    parser.add_argument("--rate-scale", type=float, default=4.0)
    parser.add_argument("--length-scale", type=float, default=0.25)
    parser.add_argument("--duration", type=float, default=80.0, help="seconds of arrivals; the mix flips halfway")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--systems", nargs="+", choices=sorted(SYSTEMS), default=list(SYSTEMS))
    parser.add_argument("--json", type=Path, help="result file")
    parser.add_argument("--plot", type=Path, help="picture of the first seed's runs")
    options = parser.parse_args()
    if not options.trace.exists():
        parser.exit(2, f"--trace: no file {options.trace}; give one in the schema of docs/replay.md\n")
    console, runs = Console(stderr=True), []
    compile_kernels(console)
    for seed in options.seeds:
        for system in options.systems:
            console.rule(f"{system}, seed {seed}")
            runs.append({"system": system, "seed": seed, **run(system, seed, options, console)})
            if options.json:
                write(options, runs)
    if options.plot:
        draw([each for each in runs if each["seed"] == options.seeds[0]], options.duration, options.plot, REPLICAS)
    for line in table(runs):
        print(line)


def run(system: str, seed: int, options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """One system under one seed on a fresh stack."""
    trace = read_trace(options.trace).scaled(options.rate_scale, options.length_scale)
    with started(system, trace, seed + 100, console) as url, Watch(url) as watch:
        played = play(url, trace, options.duration, seed, console)
        moves = history(url)
    return {"classes": played.points, "timeline": timeline(played), "samples": watch.samples, "moves": moves}


@contextlib.contextmanager
def started(system: str, trace: Trace, seed: int, console: Console) -> Iterator[str]:
    """The stack of a system, warmed up with requests that are not counted; its address."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        document = serve_document(system, slowed_profile(Path(folder)))
        url = stack.enter_context(serving_stack(document, REPLICAS, console, cpus=8))
        play(url, trace, 2 * WARM_UP_S, seed, console, WARM_UP_S)
        yield url


def play(url: str, trace: Trace, flip_s: float, seed: int, console: Console, duration_s: float | None = None) -> Replay:
    """Replay the trace's first ``duration_s``, ``flip_s`` by default; the mix flips after half of ``flip_s``."""
    flipped = with_flip(trace, flip_s)
    options = ReplayOptions(
        flipped, url=url, slo_mix=classes(), grace_s=60.0, seed=seed, duration_s=duration_s or flip_s
    )
    return replay(options, console)


def serve_document(system: str, profile: Path) -> dict[str, Any]:
    """The Serve file of a system."""
    how, fleet = (
        SYSTEMS[system],
        {"num_replicas": REPLICAS, "report_interval_s": 0.3, "role_idle_s": 3.0, "max_hops": 8},
    )
    tiers = [tier if tier.get("best_effort") else {**tier, **how.tier} for tier in TIERS]
    args = {
        "model": "embedded",
        "engine": {"kind": "simulated", "num_cpus": 0.1, **how.engine},
        "profile": str(profile),
        "fleet": {**fleet, **how.fleet},
        "ingress": {"transit_s": TRANSIT_S},
    }
    return stack_document(args, tiers)


def slowed_profile(folder: Path) -> Path:
    """The embedded model's profile with every iteration ``SLOWER`` times as long."""
    document: dict[str, Any] = load_profile("embedded-cpu").to_dict()
    slowed = {key: SLOWER * value for key, value in document["coefficients"].items()}
    document |= {"name": "embedded-cpu-slowed", "coefficients": slowed}
    path = folder / "slowed.json"
    path.write_text(json.dumps(document))
    return path


def with_flip(trace: Trace, duration_s: float) -> Trace:
    """Requests marked by the half of the run that they arrive in."""
    return dataclasses.replace(trace, app=["before" if at < duration_s / 2 else "after" for at in trace.arrival_s])


def classes() -> tuple[SloClass, ...]:
    """The mix of either half."""
    return tuple(
        SloClass(f"{name}, {half}", weight, name, app=half)
        for half, mix in MIXES.items()
        for name, weight in mix.items()
    )


def history(url: str) -> Counter[str]:
    """How often which kind of change happened, by its reason."""
    changes = httpx.get(f"{url}/polyslo/status", timeout=5.0).json()["allocation"]["history"]
    return Counter(f"{change['before']} -> {change['after']}" for change in changes)


def write(options: argparse.Namespace, runs: list[dict[str, Any]]) -> None:
    """The result file, rewritten after every run; samples of every other second only."""
    config = {key: value.name if isinstance(value, Path) else value for key, value in vars(options).items()}
    config |= {"tiers": TIERS, "mixes": MIXES, "replicas": REPLICAS, "slower": SLOWER, "transit_s": TRANSIT_S}
    config |= {"system_settings": {name: dataclasses.asdict(SYSTEMS[name]) for name in options.systems}}
    headline: dict[str, float] = {}
    for system in options.systems:
        mine = [each["classes"][0] for each in runs if each["system"] == system]
        if mine:
            headline[f"goodput_per_s_{system}"] = float(np.median([point["goodput_per_s"] for point in mine]))
            headline[f"attainment_{system}"] = float(np.median([point["attainment"] for point in mine]))
            headline[f"worst_tier_{system}"] = float(
                np.median([worst(each) for each in runs if each["system"] == system])
            )
    headline["lost"] = float(sum(lost(each) for each in runs))
    points = [
        {**{key: each[key] for key in ("system", "seed", "classes", "moves")}, "samples": thinned(each["samples"])}
        for each in runs
    ]
    write_result(options.json, "fleet_flip", config=config, seeds=options.seeds, headline=headline, points=points)


if __name__ == "__main__":
    main()
