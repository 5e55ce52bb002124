"""Sixteen replicas on the real stack while the mix of tiers flips: roles that move against static silos and one pool.

    python -m benchmarks.fleet_flip --trace ../shared/traces/azure_2023_conv.parquet --json OUT --plot OUT.png

HTTP, Serve, Ray, controller and the requests are real; engines are simulated, so that one machine holds sixteen. They
run the embedded model's profile slowed down, because the client, the door and all engines share the machine's cores.
"""

import argparse
import contextlib
import dataclasses
import json
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import matplotlib
import numpy as np
from rich.console import Console

from benchmarks.result_file import write_result
from profiles.store import load_profile
from serving.config import IMPORT_PATH
from serving.launch import compile_kernels, deploy, free_port, local_ray, url_of
from serving.replay import Replay, ReplayOptions, replay
from serving.replay_summary import outcomes
from serving.workload_mix import SloClass
from serving.workload_trace import Trace, read_trace

matplotlib.use("Agg")
import matplotlib.pyplot as plt

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
PROMISED = [(tier["name"], half) for half in MIXES for tier in TIERS[:2]]
SYSTEMS: dict[str, dict[str, dict[str, int]]] = {  # bounds of each tier
    "roles": {"interactive": {"min_replicas": 1}, "standard": {"min_replicas": 1}},
    "silos": {"interactive": {"replicas": 8}, "standard": {"replicas": 8}},
    "shared": {},
}
REPLICAS, SLOWER, SAMPLE_S = 16, 8.0, 0.5


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
        draw([each for each in runs if each["seed"] == options.seeds[0]], options.duration, options.plot)
    for line in table(runs):
        print(line)


def run(system: str, seed: int, options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """One system under one seed on a fresh stack."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        document = serve_document(system, slowed_profile(Path(folder)))
        deploy(stack.enter_context(local_ray(console, cpus=8)), document, console)
        url = url_of(document)
        wait_for_replicas(url)
        trace = read_trace(options.trace).scaled(options.rate_scale, options.length_scale)
        flipped = with_flip(trace, options.duration)
        arguments: dict[str, Any] = {"url": url, "slo_mix": classes(), "grace_s": 60.0}
        warm_up = dataclasses.replace(flipped, app=["before"] * len(flipped))
        replay(ReplayOptions(warm_up, seed=seed + 100, duration_s=8.0, **arguments), console)  # not counted
        with Watch(url) as watch:
            played = replay(ReplayOptions(flipped, seed=seed, duration_s=options.duration, **arguments), console)
        moves = history(url)
    return {"classes": played.points, "timeline": timeline(played), "samples": watch.samples, "moves": moves}


def serve_document(system: str, profile: Path) -> dict[str, Any]:
    """The Serve file of a system."""
    tiers = [{**tier, **SYSTEMS[system].get(tier["name"], {})} for tier in TIERS]
    args = {
        "model": "embedded",
        "engine": {"kind": "simulated", "cores_per_replica": 0.1},
        "profile": str(profile),
        "fleet": {"replicas": REPLICAS, "report_interval_s": 0.3, "role_idle_s": 3.0, "max_hops": 8},
    }
    ingress = {"name": "Ingress", "user_config": {"version": 1, "default_tier": "standard", "tiers": tiers}}
    app = {"name": "polyslo", "route_prefix": "/", "import_path": IMPORT_PATH, "args": args, "deployments": [ingress]}
    http = {"host": "127.0.0.1", "port": free_port()}
    return {"proxy_location": "HeadOnly", "http_options": http, "applications": [app]}


def slowed_profile(folder: Path) -> Path:
    """The embedded model's profile with every iteration ``SLOWER`` times as long."""
    document: dict[str, Any] = load_profile("embedded-cpu").to_dict()
    slowed = {key: SLOWER * value for key, value in document["coefficients"].items()}
    document |= {"name": "embedded-cpu-slowed", "coefficients": slowed}
    path = folder / "slowed.json"
    path.write_text(json.dumps(document))
    return path


def wait_for_replicas(url: str, limit_s: float = 180.0) -> None:
    """Until every replica reports."""
    give_up_s = time.monotonic() + limit_s
    while sum(replica["live"] for replica in httpx.get(f"{url}/polyslo/status").json()["replicas"]) < REPLICAS:
        if time.monotonic() > give_up_s:
            raise TimeoutError(f"not all {REPLICAS} replicas reported within {limit_s:g} s")
        time.sleep(0.5)


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


def timeline(played: Replay) -> list[dict[str, Any]]:
    """Of every request: when it was due, its tier, and whether it attained."""
    told = outcomes(played.records, played.asked)
    rows = zip(played.records, played.asked, told.attained.tolist(), strict=True)
    return [
        {"due_s": round(record.due_s, 3), "tier": asked.tier, "status": record.status.value, "attained": attained}
        for record, asked, attained in rows
    ]


def attained(run: dict[str, Any], tier: str, low_s: float, high_s: float) -> float:
    """Share of a tier's requests due in a time that attained; NaN without any."""
    flags = [row["attained"] for row in run["timeline"] if row["tier"] == tier and low_s <= row["due_s"] < high_s]
    return float(np.mean(flags)) if flags else float("nan")


def lost(run: dict[str, Any]) -> int:
    """Requests that broke off or were never answered."""
    return sum(row["status"] in ("error", "unfinished") for row in run["timeline"])


def table(runs: list[dict[str, Any]]) -> list[str]:
    """Attainment per tier and half, and what was lost."""
    lines = ["| system | seed | " + " | ".join(map(", ".join, PROMISED)) + " | attained per s | lost |"]
    lines.append("|" + "---|" * (4 + len(PROMISED)))
    for each in runs:
        points = {point["label"]: point for point in each["classes"]}
        told = " | ".join(f"{points[', '.join(key)]['attainment']:.3f}" for key in PROMISED)
        goodput = f"{points['all']['goodput_per_s']:.2f}"
        lines.append(f"| {each['system']} | {each['seed']} | {told} | {goodput} | {lost(each)} |")
    return lines


def write(options: argparse.Namespace, runs: list[dict[str, Any]]) -> None:
    """The result file, rewritten after every run; samples of every other second only."""
    config = {key: value.name if isinstance(value, Path) else value for key, value in vars(options).items()}
    config |= {"tiers": TIERS, "mixes": MIXES, "replicas": REPLICAS, "slower": SLOWER}
    headline: dict[str, float] = {}
    for system in options.systems:
        mine = [each["classes"][0] for each in runs if each["system"] == system]
        if mine:
            headline[f"goodput_per_s_{system}"] = float(np.median([point["goodput_per_s"] for point in mine]))
            headline[f"attainment_{system}"] = float(np.median([point["attainment"] for point in mine]))
    headline["lost"] = float(sum(lost(each) for each in runs))
    points = [
        {**{key: each[key] for key in ("system", "seed", "classes", "moves")}, "samples": thinned(each["samples"])}
        for each in runs
    ]
    write_result(options.json, "fleet_flip", config=config, seeds=options.seeds, headline=headline, points=points)


def thinned(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Replicas per tier and their loads, every two seconds."""
    return [
        {
            "at_s": sample["at_s"],
            "tiers": Counter(replica["tier"] for replica in sample["replicas"]),
            "loads": sorted((round(replica["load"], 2) for replica in sample["replicas"]), reverse=True),
        }
        for sample in samples[:: round(2.0 / SAMPLE_S)]
    ]


def draw(runs: list[dict[str, Any]], duration_s: float, path: Path) -> None:
    """Replicas per tier, the load of each replica, and attainment, over time; one column per system."""
    figure, axes = plt.subplots(3, len(runs), figsize=(5 * len(runs), 8), sharex=True, squeeze=False)
    for column, each in enumerate(runs):
        draw_tiers(axes[0][column], each)
        loads = np.array([sorted((r["load"] for r in s["replicas"]), reverse=True) for s in full(each["samples"])])
        at_s = [sample["at_s"] for sample in full(each["samples"])]
        picture = axes[1][column].pcolormesh(at_s, np.arange(REPLICAS), loads.T, vmin=0, vmax=1, cmap="viridis")
        figure.colorbar(picture, ax=axes[1][column], label="load")
        axes[1][column].set(ylabel="replicas, by load")
        windows: list[float] = np.arange(0.0, duration_s, 5.0).tolist()
        for tier in ("interactive", "standard"):
            shares = [attained(each, tier, low_s, low_s + 5.0) for low_s in windows]
            axes[2][column].plot(np.add(windows, 2.5), shares, marker=".", label=tier)
        axes[2][column].set(xlabel="seconds", ylabel="attained", ylim=(-0.02, 1.02))
        axes[2][column].legend()
        for row in axes[:, column]:
            row.axvline(duration_s / 2, color="grey", linestyle=":")
        axes[0][column].set_title(each["system"])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    plt.close(figure)


def draw_tiers(axes: Any, each: dict[str, Any]) -> None:
    """Replicas per tier as a stack."""
    samples = full(each["samples"])
    names = ["interactive", "standard", "shared", "pending", "pool"]
    counts = [[sum(r["tier"] == name for r in sample["replicas"]) for sample in samples] for name in names]
    used = [(name, row) for name, row in zip(names, counts, strict=True) if any(row)]
    at_s = [sample["at_s"] for sample in samples]
    axes.stackplot(at_s, *[row for _, row in used], labels=[name for name, _ in used])
    axes.set(ylabel="replicas", ylim=(0, REPLICAS))
    axes.legend(loc="lower right", fontsize=8)


def full(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Samples that show every replica."""
    return [sample for sample in samples if len(sample["replicas"]) == REPLICAS]


if __name__ == "__main__":
    main()
