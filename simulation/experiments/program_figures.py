"""What the experiment on programs says of its points: the headline and the tables."""

from collections.abc import Mapping, Sequence

import numpy as np

from simulation.experiments.program_systems import ABLATIONS, OURS, VLLM
from simulation.experiments.registry import Point, markdown_table

TARGETS = (0.95, 0.99)


def _median_share(points: Sequence[Point], load: str, system: str, figure: str = "on_time") -> dict[float, float]:
    """Share on time per scale, or another figure of the points, the median over seeds."""
    own = [p for p in points if (p["load"], p["system"]) == (load, system)]
    if not own:
        return {}
    return dict(zip(own[0]["scales"], np.median([p[figure] for p in own], axis=0).tolist(), strict=True))


def least_scale(shares: Mapping[float, float], target: float) -> float:
    """Least scale from which on the share on time stays at the target; inf where it does at none."""
    least = np.inf
    for scale in sorted(shares, reverse=True):
        if shares[scale] < target:
            break
        least = scale
    return float(least)


def scale_ratio(
    own: Mapping[float, float], rivals: Sequence[Mapping[float, float]], target: float
) -> tuple[float, str]:
    """The least scale that holds over that of the best rival, and of what kind a bound it is, if one: whoever holds at
    no scale that was run would need more than the greatest. nan where that is both."""
    ours, greatest = least_scale(own, target), max(own, default=np.nan)
    best = min((least_scale(shares, target) for shares in rivals), default=np.inf)
    if ours == best == np.inf:
        return np.nan, ""
    bound = "upper" if best == np.inf else "lower" if ours == np.inf else ""
    return min(ours, greatest) / min(best, greatest), bound


def headline(points: Sequence[Point]) -> dict[str, float]:
    """Programs on time over those of vLLM with affinity, means over all scales, the same with programs that ended in
    time without a promise, and the least scale that holds 95 and 99 % over that of the best rival (below 1: tighter
    deadlines; a bound where one of both holds at no scale that was run); geometric means and per load."""
    loads = list(dict.fromkeys(p["load"] for p in points))
    figures, bounds, ratios = dict[str, float](), dict[str, float](), dict[str, list[float]]()
    for load in loads:
        systems = [s for s in dict.fromkeys(p["system"] for p in points if p["load"] == load) if s not in ABLATIONS]
        shares = {system: _median_share(points, load, system) for system in systems}
        if OURS not in shares:
            continue
        found = dict[str, float]()
        for figure in ("on_time", "in_time"):
            means_of = {s: float(np.mean(list(_median_share(points, load, s, figure).values()))) for s in systems}
            own, stock = means_of.pop(OURS), means_of.get(VLLM, 0.0)
            others = max(means_of.values(), default=0.0)
            found[f"programs_{figure}_ratio"] = own / stock if stock else np.nan
            found[f"programs_{figure}_ratio_best_rival"] = own / others if others else np.nan
        for target in TARGETS:
            name, rivals = f"deadline_scale_at_{100 * target:.0f}", [shares[name] for name in systems if name != OURS]
            found[name], bound = scale_ratio(shares[OURS], rivals, target)
            if bound:
                bounds[f"{name}_is_{bound}_bound"] = 1.0
        for name, value in found.items():
            figures[f"{name} {load}"] = value
            ratios.setdefault(name, []).append(value)
    means = {
        name: float(np.exp(np.mean(np.log(known))))
        for name, all_ in ratios.items()
        if (known := [v for v in all_ if 0.0 < v < np.inf])
    }
    return {name: round(float(value), 4) for name, value in (means | bounds | figures).items() if np.isfinite(value)}


def tables(points: Sequence[Point]) -> str:
    """Per load: share of programs on time by scale and system."""
    parts = []
    for load in dict.fromkeys(p["load"] for p in points):
        own = [p for p in points if p["load"] == load]
        rows = []
        for system in dict.fromkeys(p["system"] for p in own):
            mine = [p for p in own if p["system"] == system]
            shares = np.array([p["on_time"] for p in mine])
            cells = [_spread(column) for column in shares.T]
            at = mine[0]["scales"].index(mine[0]["reference"])
            told = [float(np.median([p[name][at] for p in mine])) for name in ("refused", "kept", "in_time", "cached")]
            budgets = "/".join(str(budget) for budget in dict.fromkeys(p["budget"] for p in mine))
            rows.append([system, *cells, *(f"{share:.2f}" for share in told), budgets, len(mine)])
        scales = [f"scale {scale:g}" for scale in own[0]["scales"]]
        at = f"at {own[0]['reference']:g}"
        header = (
            "system",
            *scales,
            f"not promised {at}",
            f"kept of promised {at}",
            f"in time {at}, promised or not",
            f"cached {at}",
            "tokens an iteration",
            "seeds",
        )
        parts.append(f"### {load}\n\n" + markdown_table(header, rows))
    return "\n\n".join(parts)


def _spread(shares: np.ndarray) -> str:
    told = f"{np.median(shares):.2f}"
    return told if len(shares) == 1 else f"{told} ({shares.min():.2f} to {shares.max():.2f})"
