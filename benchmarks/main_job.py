"""The main job on real engines: a real trace over HTTP against two vLLM replicas, polyslo against plain round-robin.

    python -m benchmarks.main_job --trace ../shared/traces/azure_2023_conv.parquet [--quick] --json OUT

Each run brings up its own Ray and its own engines and plays every load; systems take turns, so that a machine that
changes changes for both. The plain system is the same stack with admission off, round-robin routing and vLLM's own
scheduler. A load is a multiple of the capacity: what that system serves when it is saturated.

The tier table that ships refuses interactive requests that cannot be on time; what is refused makes no tokens. The
system `polyslo-serves-all` is the same stack with a table that serves them best effort instead.
"""

import argparse
import contextlib
import os
import statistics
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.result_file import write_result
from serving.launch.launch import deploy, read_document, url_of
from serving.launch.local_ray import free_port, local_ray
from serving.loadgen.mix import read_mix
from serving.loadgen.replay import Replay, ReplayOptions, replay

ROOT = Path(__file__).resolve().parent.parent
PROFILE = "embedded-cpu"  # whose speed timed devices have
SYSTEMS: dict[str, dict[str, dict[str, Any]]] = {
    "polyslo": {},
    "polyslo-serves-all": {"tier": {"unattainable": "best_effort"}},
    "round-robin": {"engine": {"scheduler": "vllm"}, "fleet": {"routing": "round_robin", "admission": False}},
}


def main() -> None:
    """Parse, run in turns, write and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=ROOT.parent / "shared/traces/azure_2023_conv.parquet")
    parser.add_argument("--mix", type=Path, default=ROOT / "examples/mix-main-job.yaml")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 0.8, 1.0, 1.5, 2.5], help="of the capacity")
    parser.add_argument("--capacity-scale", type=float, default=3.9, help="of the trace's arrivals: load 1")
    parser.add_argument("--length-scale", type=float, default=0.25)
    parser.add_argument("--duration", type=float, default=60.0, help="seconds of arrivals in each run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--systems", nargs="+", choices=sorted(SYSTEMS), default=list(SYSTEMS))
    parser.add_argument(
        "--device", choices=("auto", "timed"), default="auto", help="timed: engines that only keep time"
    )
    parser.add_argument("--quick", action="store_true", help="one seed, 10 s at 0.5 and 1.5 times the capacity")
    parser.add_argument("--json", type=Path, help="result file")
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.duration, options.loads = options.seeds[:1], 10.0, [0.5, 1.5]
    if not options.trace.exists():
        parser.exit(2, f"--trace: no file {options.trace}; give one in the schema of docs/replay.md\n")
    console = Console(stderr=True)
    points = []
    for seed in options.seeds:
        for system in options.systems:
            console.rule(f"{system}, seed {seed}")
            points += [{"system": system, "seed": seed, **point} for point in run(system, seed, options, console)]
            if options.json:
                write(options.json, options, points)
    for line in table(points):
        print(line)


def run(system: str, seed: int, options: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    """One system under one seed on fresh engines: one point per load."""
    document = read_document(ROOT / "serve.yaml")
    document["http_options"]["port"] = free_port()
    change(document["applications"][0], SYSTEMS[system], options.device)
    points = []
    with contextlib.ExitStack() as stack:
        deploy(stack.enter_context(local_ray(console)), document, console)
        workload = {"trace": options.trace, "url": url_of(document), "slo_mix": tuple(read_mix(options.mix))}

        def play(load: float, seed: int, duration_s: float) -> Replay:
            scales = {"rate_scale": load * options.capacity_scale, "length_scale": options.length_scale}
            return replay(ReplayOptions(**workload, **scales, seed=seed, duration_s=duration_s, grace_s=60.0), console)

        play(1.0, seed + 100, 8.0)  # warm-up, not counted
        for load in options.loads:
            before = os.getloadavg()[0]
            played = play(load, seed, options.duration)
            points.append(
                {"load": load, "load_average_before": before, "classes": played.points, "replay": played.config}
            )
    return points


def change(application: dict[str, Any], changes: dict[str, dict[str, Any]], device: str) -> None:
    """Make the application that ships one system: sections of its ``args``, keys of every tier with an objective."""
    args = application["args"]
    for section in changes.keys() - {"tier"}:
        args[section] = {**args.get(section, {}), **changes[section]}
    if device == "timed":
        args["profile"] = PROFILE
        args["engine"] = {**args["engine"], "device": "timed"}
    for tier in application["deployments"][0]["user_config"]["tiers"]:
        tier.update({} if tier.get("best_effort") else changes.get("tier", {}))


def table(points: list[dict[str, Any]]) -> list[str]:
    """Attainment per load, class and system: median over the seeds with all of them; promises kept over all seeds."""
    lines = [
        "| load | system | class | asked/s | attained (median) | per seed | kept | refused | best effort | tokens/s |"
    ]
    lines.append("|---|---|---|---|---|---|---|---|---|---|")
    for load, system in sorted({(point["load"], point["system"]) for point in points}):
        own = [point for point in points if (point["load"], point["system"]) == (load, system)]
        mine, seconds = [point["classes"] for point in own], [point["replay"]["duration_s"] for point in own]
        for label in [entry["label"] for entry in mine[0]]:
            rows = [next(entry for entry in classes if entry["label"] == label) for classes in mine]
            shares = [row["attainment"] for row in rows if row["attainment"] is not None]
            told = f"{statistics.median(shares):.3f}" if shares else "no promise"
            each = ", ".join(f"{share:.3f}" for share in shares)
            means = [statistics.median(row[name] for row in rows) for name in ("refused", "downgraded", "tokens_per_s")]
            promised, kept = promises(rows)
            share = f"{kept / promised:.3f} of {promised}" if promised else ""
            figures = f"{means[0]:g} | {means[1]:g} | {means[2]:.0f}"
            asked = sum(row["requests"] for row in rows) / sum(seconds)
            lines.append(f"| {load:g} | {system} | {label} | {asked:.1f} | {told} | {each} | {share} | {figures} |")
    return lines


def promises(rows: list[dict[str, Any]]) -> tuple[int, int]:
    """How many promises were made, and how many of them were kept."""
    made = [(row["promised"], row["kept_share"]) for row in rows if row["promised"]]
    return sum(count for count, _ in made), round(sum(count * share for count, share in made))


def headline(points: list[dict[str, Any]]) -> dict[str, float]:
    """Promises kept at the worst load; attainment, of all and of the worst tier, and tokens over round-robin's.

    Without a suffix of the stack as shipped; ``_served`` of the one that serves best effort what it cannot promise.
    """
    figures: dict[str, float] = {}
    for system, suffix in (("polyslo", ""), ("polyslo-serves-all", "_served")):
        figures |= {f"{name}{suffix}": value for name, value in over_plain(points, system).items()}
    return figures


def over_plain(points: list[dict[str, Any]], system: str) -> dict[str, float]:
    """The figures of one system, the worst over the loads; without a ratio where round-robin has not run."""
    figures: dict[str, list[float]] = {}
    by_load: dict[tuple[float, str], list[list[dict[str, Any]]]] = {}
    for point in points:
        by_load.setdefault((point["load"], point["system"]), []).append(point["classes"])
    for (load, name), runs in by_load.items():
        if name != system:
            continue
        promised, held = promises([classes[0] for classes in runs])
        if promised:
            figures.setdefault("kept_worst_load", []).append(held / promised)
        if (load, "round-robin") in by_load:
            own, plain = medians(runs), medians(by_load[load, "round-robin"])
            ratios = {label: figure[0] / max(plain[label][0], 1e-9) for label, figure in own.items()}
            tiers = [ratio for label, ratio in ratios.items() if label != "all" and makes_promises(runs, label)]
            figures.setdefault("attained_ratio_worst_tier", []).append(min(tiers))
            figures.setdefault("attained_ratio", []).append(ratios["all"])
            figures.setdefault("tokens_per_s_ratio", []).append(own["all"][1] / plain["all"][1])
    return {name: min(values) for name, values in figures.items()}


def medians(runs: list[list[dict[str, Any]]]) -> dict[str, tuple[float, float]]:
    """Attainment (0 without a promise) and tokens per second of each class, medians over seeds. The order of classes is
    that in which their first requests came, another one with each seed."""
    return {
        label: (
            statistics.median(entry["attainment"] or 0.0 for entry in entries),
            statistics.median(entry["tokens_per_s"] for entry in entries),
        )
        for label, entries in by_label(runs).items()
    }


def by_label(runs: list[list[dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    """The entries of each class, one per seed in which it occurs."""
    found: dict[str, list[dict[str, Any]]] = {}
    for entry in (entry for classes in runs for entry in classes):
        found.setdefault(entry["label"], []).append(entry)
    return found


def makes_promises(runs: list[list[dict[str, Any]]], label: str) -> bool:
    """Whether requests of the class have an objective."""
    return any(entry["attainment"] is not None for entry in by_label(runs)[label])


def write(path: Path, options: argparse.Namespace, points: list[dict[str, Any]]) -> None:
    """The result file, rewritten after every run."""
    config = {key: value.name if isinstance(value, Path) else value for key, value in vars(options).items()}
    seeds = sorted({point["seed"] for point in points})
    write_result(path, "main_job", config=config, seeds=seeds, headline=headline(points), points=points)


if __name__ == "__main__":
    main()
