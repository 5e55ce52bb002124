"""What ``polyserve`` and ``polyserve-burst`` quote of their points, exact and under noise. Pure functions of them."""

from collections.abc import Mapping, Sequence
from statistics import mode

import numpy as np

from simulation.experiments.registry import Point, markdown_table
from simulation.experiments.slos_serve_figures import EXACT, geomean, least_kept, noise_of

POOLED = ("fixed-budget", "edf-shed", "silos")
RIVALS = {"planner": ("fixed-budget",), "planner-apart": ("fixed-apart", "fixed-budget")}


def by_noise(points: Sequence[Point]) -> dict[str, list[Point]]:
    """Points by what stands behind their figures' names."""
    found: dict[str, list[Point]] = {}
    for point in points:
        noise = noise_of(point)
        found.setdefault("" if noise == EXACT else f"_{noise}", []).append(point)
    return found


def _by_place(points: Sequence[Point], replicas: int) -> dict[tuple[str, str], Point]:
    return {(p["data_set"], p["system"]): p for p in points if p["replicas"] == replicas}


def ratios(points: Mapping[tuple[str, str], Point], ours: str, theirs: Sequence[str]) -> list[float]:
    """Median goodput of ``ours`` over the best of ``theirs`` for every data set that has all of them."""
    found = []
    for data_set in dict.fromkeys(name for name, _ in points):
        rivals = [points[data_set, name]["worst_tier"]["median"] for name in theirs if (data_set, name) in points]
        if len(rivals) == len(theirs) and (data_set, ours) in points:
            found.append(points[data_set, ours]["worst_tier"]["median"] / max(rivals))
    return found


def _over_all(points: Mapping[tuple[str, str], Point], data_set: str) -> float:
    """Median goodput of the planner over the best of all rivals with one pool that were run; 0 where none was."""
    rivals = [points[data_set, name]["worst_tier"]["median"] for name in POOLED if (data_set, name) in points]
    own = points.get((data_set, "planner"))
    return own["worst_tier"]["median"] / max(rivals) if own is not None and rivals else 0.0


def headline(points: Sequence[Point]) -> dict[str, float]:
    """What is quoted, that of engines that stray with the noise's name behind; geometric means over data sets."""
    figures: dict[str, float] = {}
    for suffix, own in by_noise(points).items():
        figures |= {f"{name}{suffix}": round(value, 4) for name, value in _figures(own).items() if np.isfinite(value)}
    return figures


def _figures(points: Sequence[Point]) -> dict[str, float]:
    """The figures of one noise; nan for those whose points were not run."""
    known = _by_place(points, mode(p["replicas"] for p in points) if points else 0)
    colocated, apart = (ratios(known, name, rivals) for name, rivals in RIVALS.items())
    shed = ratios(known, "planner", ("edf-shed",))
    every = [ratio for name in dict.fromkeys(name for name, _ in known) if (ratio := _over_all(known, name)) > 0.0]

    def of_bound(system: str) -> float:
        shares = [p["worst_tier"]["median"] / p["bound"] for (_, name), p in known.items() if name == system]
        return geomean(shares)

    figures = {
        "goodput_ratio_colocated": geomean(colocated),
        "goodput_ratio_disaggregated": geomean(apart),
        "goodput_ratio_min": min([*colocated, *apart], default=float("nan")),
        "ratio_vs_best_rival_geomean": geomean(every),
        "ratio_vs_shed_geomean": geomean(shed),
        "ratio_vs_shed_min": min(shed, default=float("nan")),
        "of_bound_colocated": of_bound("planner"),
        "of_bound_disaggregated": of_bound("planner-apart"),
        "kept_min": least_kept(points),
    }
    for replicas in sorted({p["replicas"] for p in points}):
        own = _by_place(points, replicas)
        figures[f"ratio_vs_silos_and_pool_min_{replicas}"] = min(
            ratios(own, "planner", ("silos", "fixed-budget")), default=float("nan")
        )
    return figures


def tables(points: Sequence[Point]) -> str:
    """Goodput per fleet size, data set and system, exact engines first; then what was left out of the data sets."""
    parts = []
    for suffix, replicas in sorted({(at, p["replicas"]) for at, own in by_noise(points).items() for p in own}):
        rows: list[list[object]] = []
        for p in (p for p in by_noise(points)[suffix] if p["replicas"] == replicas):
            tier = p["worst_tier"]
            spread = f"{tier['low']:.3g} to {tier['high']:.3g}"
            share = tier["median"] / p["bound"]
            overall = p["overall"]["median"]
            each = tier["median"] / replicas
            rows.append(
                [p["data_set"], p["system"], p["setting"], tier["median"], spread, each, overall, p["bound"], share]
            )
        header = (
            "lengths",
            "system",
            "setting",
            "req/s, every tier",
            "over seeds",
            "per replica",
            "overall",
            "bound",
            "of the bound",
        )
        parts.append(f"### {replicas} replicas{suffix.replace('_', ', ')}\n\n{markdown_table(header, rows)}")
    excluded = {p["data_set"]: p["excluded"] for p in points}
    rows = [[name, f"{share:.1%}"] for name, share in excluded.items() if share > 0]
    if rows:
        parts.append(
            "### Left out: no idle replica could serve them in time\n\n" + markdown_table(("lengths", "share"), rows)
        )
    return "\n\n".join(parts)
