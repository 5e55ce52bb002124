"""The scenario of ``fleet_flip`` on the real stack at rising rates: which goodput each system reaches.

    python -m benchmarks.fleet_flip_rates --systems shared --rate-scales 3 4 5 --json docs/results/fleet-rates.json

One stack per system, every rate and seed on it in turn, until a rate is too much. Points that the result file has of
other systems, rates and seeds are kept, so that each system may have its own. Goodput is as in ``fleet_flip_virtual``.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.fleet_flip import REPLICAS, ROOT, SLOWER, SYSTEMS, TRANSIT_S, play, started
from benchmarks.fleet_flip_report import PROMISED, lost, timeline
from benchmarks.fleet_flip_virtual import LENGTH_SCALE, goodput_per_s, holds
from benchmarks.result_file import write_result
from serving.launch.kernels import compile_kernels
from serving.loadgen.trace import read_trace


def main() -> None:
    """Parse, run every system up to the rate that is too much, write and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=ROOT.parent / "shared/traces/azure_2023_conv.parquet")
    parser.add_argument("--rate-scales", type=float, nargs="+", default=[2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0])
    parser.add_argument("--duration", type=float, default=60.0, help="seconds of arrivals; the mix flips halfway")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--systems", nargs="+", choices=sorted(SYSTEMS), default=list(SYSTEMS))
    parser.add_argument("--json", type=Path, help="result file; points that are not run now are kept in it")
    options = parser.parse_args()
    if not options.trace.exists():
        parser.exit(2, f"--trace: no file {options.trace}; give one in the schema of docs/replay.md\n")
    console = Console(stderr=True)
    compile_kernels(console)
    points = points_in(options.json)
    for system in options.systems:
        sweep(system, points, options, console)
        print(f"{system}: {goodput_per_s(of(system, points)):.1f} requests/s", flush=True)


def sweep(system: str, points: list[dict[str, Any]], options: argparse.Namespace, console: Console) -> None:
    """Add a system's points, one by one."""
    scales, trace = sorted(options.rate_scales), read_trace(options.trace)
    with started(system, trace.scaled(scales[0], LENGTH_SCALE), 0, console) as url:
        for scale in scales:
            for seed in options.seeds:
                console.rule(f"{system}, rate times {scale:g}, seed {seed}")
                played = play(url, trace.scaled(scale, LENGTH_SCALE), options.duration, seed, console)
                told = {point["label"]: point for point in played.points}
                shares = {label: told[label]["attainment"] for label in map(", ".join, PROMISED)}
                everything = told["all"]
                points[:] = [point for point in points if key(point) != (system, scale, seed)]
                points.append(
                    {
                        "system": system,
                        "scale": scale,
                        "seed": seed,
                        "rate_per_s": everything["with_slo"] / options.duration,
                        **shares,
                        "attainment": everything["attainment"],
                        "refused": everything["refused"],
                        "lost": lost({"timeline": timeline(played)}),
                    }
                )
                console.print(points[-1])
                if options.json:
                    write(options, points)
            if not holds(of(system, points), scale):
                break


def key(point: dict[str, Any]) -> tuple[str, float, int]:
    """What is measured once."""
    return point["system"], point["scale"], point["seed"]


def of(system: str, points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The points of one system."""
    return [point for point in points if point["system"] == system]


def points_in(path: Path | None) -> list[dict[str, Any]]:
    """What a result file holds already."""
    if path is None or not path.exists():
        return []
    return list(json.loads(path.read_text(encoding="utf-8"))["points"])


def write(options: argparse.Namespace, points: list[dict[str, Any]]) -> None:
    """The result file, rewritten after every run."""
    systems = [system for system in SYSTEMS if of(system, points)]
    config = {"trace": options.trace.name, "duration": options.duration, "length_scale": LENGTH_SCALE}
    config |= {"replicas": REPLICAS, "slower": SLOWER, "transit_s": TRANSIT_S, "systems": systems}
    headline = {f"goodput_per_s_{system}": goodput_per_s(of(system, points)) for system in systems}
    headline["lost"] = float(sum(point["lost"] for point in points))
    seeds = sorted({point["seed"] for point in points})
    write_result(
        options.json, "fleet_flip_rates", config=config, seeds=seeds, headline=headline, points=sorted(points, key=key)
    )


if __name__ == "__main__":
    main()
