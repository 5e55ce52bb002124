"""The main job on real engines: a real trace over HTTP against two vLLM replicas, polyslo against plain round-robin.

    python -m benchmarks.main_job --trace ../shared/traces/azure_2023_conv.parquet --json OUT

Each run brings up its own Ray and its own engines; systems take turns, so that a machine that changes changes for both.
The plain system is the same stack with admission off, round-robin routing and vLLM's own scheduler.
"""

import argparse
import contextlib
import copy
import os
import statistics
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.result_file import write_result
from serving.launch.launch import deploy, read_document, url_of
from serving.launch.local_ray import free_port, local_ray
from serving.loadgen.mix import read_mix
from serving.loadgen.replay import ReplayOptions, replay

ROOT = Path(__file__).resolve().parent.parent
SYSTEMS: dict[str, dict[str, dict[str, Any]]] = {
    "polyslo": {},
    "round-robin": {"engine": {"scheduler": "vllm"}, "fleet": {"routing": "round_robin", "admission": False}},
}


def main() -> None:
    """Parse, run in turns, write and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=ROOT.parent / "shared/traces/azure_2023_conv.parquet")
    parser.add_argument("--mix", type=Path, default=ROOT / "examples/mix-main-job.yaml")
    parser.add_argument("--rate-scale", type=float, default=3.0)
    parser.add_argument("--length-scale", type=float, default=0.25)
    parser.add_argument("--duration", type=float, default=60.0, help="seconds of arrivals in each run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--systems", nargs="+", choices=sorted(SYSTEMS), default=list(SYSTEMS))
    parser.add_argument("--json", type=Path, help="result file")
    options = parser.parse_args()
    if not options.trace.exists():
        parser.exit(2, f"--trace: no file {options.trace}; give one in the schema of docs/replay.md\n")
    console = Console(stderr=True)
    points = []
    for seed in options.seeds:
        for system in options.systems:
            console.rule(f"{system}, seed {seed}")
            points.append({"system": system, "seed": seed, **run(system, seed, options, console)})
            if options.json:
                write(options.json, options, points)
    for line in table(points):
        print(line)


def run(system: str, seed: int, options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """One system under one seed on fresh engines."""
    document = read_document(ROOT / "serve.yaml")
    document["http_options"]["port"] = free_port()
    args = document["applications"][0]["args"]
    for section, changes in copy.deepcopy(SYSTEMS[system]).items():
        args[section] = {**args.get(section, {}), **changes}
    with contextlib.ExitStack() as stack:
        deploy(stack.enter_context(local_ray(console)), document, console)
        url = url_of(document)
        workload = {"trace": options.trace, "url": url, "slo_mix": tuple(read_mix(options.mix)), "grace_s": 60.0}
        scales = {"rate_scale": options.rate_scale, "length_scale": options.length_scale}
        replay(ReplayOptions(**workload, **scales, seed=seed + 100, duration_s=8.0), console)  # warm-up, not counted
        before = os.getloadavg()[0]
        played = replay(ReplayOptions(**workload, **scales, seed=seed, duration_s=options.duration), console)
    return {"load_average_before": before, "classes": played.points, "replay": played.config}


def table(points: list[dict[str, Any]]) -> list[str]:
    """Attainment per class and system: median over the seeds, with all of them."""
    lines = ["| system | class | attained (median) | per seed | refused | best effort | tokens/s |"]
    lines.append("|---|---|---|---|---|---|---|")
    for system in dict.fromkeys(point["system"] for point in points):
        mine = [point["classes"] for point in points if point["system"] == system]
        for label in [entry["label"] for entry in mine[0]]:
            rows = [next(entry for entry in classes if entry["label"] == label) for classes in mine]
            shares = [row["attainment"] for row in rows if row["attainment"] is not None]
            told = f"{statistics.median(shares):.3f}" if shares else "no promise"
            each = ", ".join(f"{share:.3f}" for share in shares)
            means = [statistics.median(row[name] for row in rows) for name in ("refused", "downgraded", "tokens_per_s")]
            lines.append(f"| {system} | {label} | {told} | {each} | {means[0]:g} | {means[1]:g} | {means[2]:.0f} |")
    return lines


def headline(points: list[dict[str, Any]]) -> dict[str, float]:
    """Median attainment and goodput of each system, and their ratio."""
    figures: dict[str, float] = {}
    for system in dict.fromkeys(point["system"] for point in points):
        whole = [point["classes"][0] for point in points if point["system"] == system]
        figures[f"attainment_{system}"] = statistics.median(entry["attainment"] for entry in whole)
        figures[f"goodput_per_s_{system}"] = statistics.median(entry["goodput_per_s"] for entry in whole)
    if len(figures) == 2 * len(SYSTEMS):
        figures["goodput_ratio"] = figures["goodput_per_s_polyslo"] / max(figures["goodput_per_s_round-robin"], 1e-9)
    return figures


def write(path: Path, options: argparse.Namespace, points: list[dict[str, Any]]) -> None:
    """The result file, rewritten after every run."""
    config = {key: value.name if isinstance(value, Path) else value for key, value in vars(options).items()}
    seeds = sorted({point["seed"] for point in points})
    write_result(path, "main_job", config=config, seeds=seeds, headline=headline(points), points=points)


if __name__ == "__main__":
    main()
