"""What ``slos-serve`` quotes of its points, exact and under noise. Pure functions of the points."""

from collections.abc import Mapping, Sequence

import numpy as np

from simulation.experiments.registry import Point, markdown_table
from simulation.workloads.scenarios import BURSTY

STOCK = ("vllm-2048", "vllm-whole", "sarathi")
PEERS = ("planner-x2", "planner-x3")  # as many GPUs as DistServe has, whose bursts they share as it does
SIMPLE_RIVALS = ("edf-shed", "sarathi-shed")
ALL_RIVALS = (*STOCK, *SIMPLE_RIVALS, "edf", "sjf")  # ``no-admission`` forms the planner's own batches
EXACT = "exact"  # the noise of points that name none
Capacities = dict[tuple[str, str, str], float]  # by GPU, scenario and system


def noise_of(point: Point) -> str:
    """What its engines stray by; points of exact engines do not say."""
    return str(point.get("noise", EXACT))


def _ratio(
    points: Mapping[tuple[str, str, str], float], gpu: str, scenario: str, ours: str, theirs: Sequence[str]
) -> float:
    """Capacity of ``ours`` over the best of ``theirs``; nan where one was not run."""
    known = [points[gpu, scenario, name] for name in theirs if (gpu, scenario, name) in points]
    if not known or (gpu, scenario, ours) not in points:
        return float("nan")
    return points[gpu, scenario, ours] / max(known) if max(known) > 0 else float("inf")


def capacities(points: Sequence[Point]) -> Capacities:
    """Median per-tier capacity by GPU, scenario and system."""
    return {
        (p["gpu"], p["scenario"], p["system"]): p["worst_tier"]["median"] for p in points if p["kind"] == "capacity"
    }


def geomean(values: Sequence[float]) -> float:
    """Geometric mean of the finite values; nan without any."""
    known = np.array([v for v in values if np.isfinite(v)])
    return float(np.exp(np.log(known).mean())) if len(known) else float("nan")


def headline(points: Sequence[Point]) -> dict[str, float]:
    """The figures that are quoted, those of engines that stray with the noise's name behind; each over all GPUs and
    scenarios that were run."""
    figures: dict[str, float] = {}
    for noise in dict.fromkeys(map(noise_of, points)):
        suffix = "" if noise == EXACT else f"_{noise}"
        found = _figures([point for point in points if noise_of(point) == noise])
        figures |= {f"{name}{suffix}": round(value, 4) for name, value in found.items() if np.isfinite(value)}
    return figures


def _figures(points: Sequence[Point]) -> dict[str, float]:
    """The figures of one noise; nan for those whose points were not run."""
    known = capacities(points)
    places = sorted({(gpu, scenario) for gpu, scenario, _ in known})

    def over(ours: str, theirs: Sequence[str]) -> list[float]:
        return [_ratio(known, gpu, scenario, ours, theirs) for gpu, scenario in places]

    steady = [p for p in points if p["kind"] == "capacity" and p["system"] == "planner" and p["scenario"] not in BURSTY]
    shed, unadmitted = (
        [value for value in over("planner", rivals) if np.isfinite(value)]
        for rivals in (SIMPLE_RIVALS, ("no-admission",))
    )
    return {
        "capacity_ratio_vs_best_geomean": geomean(over("planner", STOCK)),
        "capacity_ratio_vs_best_rival_geomean": geomean(over("planner", ALL_RIVALS)),
        "capacity_ratio_vs_best_geomean_spec": geomean(over("planner-spec", (*STOCK, "vllm-spec"))),
        "capacity_ratio_vs_distserve_geomean": geomean(_over_distserve(points)),
        "capacity_ratio_vs_shed_min": min(shed, default=float("nan")),
        "capacity_ratio_vs_no_admission_min": min(unadmitted, default=float("nan")),
        "kept_min": least_kept(points),
        "of_bound_steady_min": _least_of(steady, "bound"),
        "of_fluid_bound_steady_min": _least_of(steady, "bound_fluid"),
        "scaling_4_chatbot": _scaling(points, "ChatBot", "fleet"),
        "scaling_4_coder": _scaling(points, "Coder", "fleet"),
        "scaling_4_coder_pooled": _scaling(points, "Coder", "pooled"),
        "capacity_ratio_at_2pct": _strict_ratio(points),
    }


def least_kept(points: Sequence[Point]) -> float:
    """Least share of promises kept, at the capacity or in overload; nan where none were counted."""
    counts = [point[where] for point in points for where in ("at_capacity", "overload") if where in point]
    return min((kept / promised for _asked, promised, kept in counts if promised), default=float("nan"))


def _least_of(points: Sequence[Point], bound: str) -> float:
    """Least share of a bound that was reached; nan without points."""
    return min((p["worst_tier"]["median"] / p[bound] for p in points), default=float("nan"))


def _over_distserve(points: Sequence[Point]) -> list[float]:
    """Capacity per GPU of a planned fleet over that of DistServe with as many GPUs, per GPU kind and scenario."""
    own = {(p["gpu"], p["scenario"], p["system"]): p for p in points if p["kind"] == "capacity"}
    ratios = []
    for (gpu, scenario, system), p in own.items():
        peer = own.get((gpu, scenario, PEERS[0] if p["setting"].startswith("1:1") else PEERS[1]))
        if system == "distserve" and peer is not None and p["worst_tier"]["median"] > 0:
            ratios.append(peer["worst_tier"]["median"] / p["worst_tier"]["median"])
    return ratios


def _scaling(points: Sequence[Point], scenario: str, how: str) -> float:
    """Capacity of four replicas over that of one under the same controller."""
    found = {p["replicas"]: p[how]["median"] for p in points if p["kind"] == "fleet" and p["scenario"] == scenario}
    return float(found[4] / found[1]) if {1, 4} <= set(found) and found[1] > 0 else float("nan")


def _strict_ratio(points: Sequence[Point]) -> float:
    found = {p["system"]: p["worst_tier"]["median"] for p in points if p["kind"] == "strict"}
    rivals = [value for name, value in found.items() if name != "planner"]
    return (
        float(found["planner"] / max(rivals)) if "planner" in found and max(rivals, default=0.0) > 0 else float("nan")
    )


def _is_straying(point: Point) -> bool:
    return noise_of(point) != EXACT


def tables(points: Sequence[Point]) -> str:
    """Capacity per GPU, scenario and system, then fleets; exact engines first."""
    parts = []
    for noise, gpu in dict.fromkeys((noise_of(p), p["gpu"]) for p in sorted(points, key=_is_straying)):
        own = [p for p in points if (noise_of(p), p["gpu"], p["kind"]) == (noise, gpu, "capacity")]
        rows: list[list[object]] = []
        for scenario in dict.fromkeys(p["scenario"] for p in own):
            for p in (p for p in own if p["scenario"] == scenario):
                spread = f"{p['worst_tier']['low']:.3g} to {p['worst_tier']['high']:.3g}"
                tier, overall = p["worst_tier"]["median"], p["overall"]["median"]
                of_bounds = tier / p["bound"], tier / p["bound_fluid"]
                rows.append([scenario, p["system"], p["setting"], tier, spread, overall, *of_bounds])
        header = ("scenario", "system", "setting", "req/s per GPU, every tier", "over seeds", "overall",
                  "of the bound", "of the fluid one")  # fmt: skip
        title = gpu if noise == EXACT else f"{gpu}, {noise}"
        parts.append(f"### {title}\n\n{markdown_table(header, rows)}")
    fleets = [p for p in points if p["kind"] == "fleet"]
    if fleets:
        rows = [
            [noise_of(p), p["scenario"], p["replicas"], p["fleet"]["median"], p["pooled"]["median"]] for p in fleets
        ]
        names = ("noise", "scenario", "replicas", "req/s, controller", "req/s, one try per request")
        parts.append(f"### Several replicas\n\n{markdown_table(names, rows)}")
    strict = [p for p in points if p["kind"] == "strict"]
    if strict:
        rows = [[p["system"], p["worst_tier"]["median"]] for p in strict]
        parts.append("### ChatBot at 98 % attainment\n\n" + markdown_table(("system", "req/s per GPU"), rows))
    return "\n\n".join(parts)
