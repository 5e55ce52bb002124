"""What ``benchmarks.engine_slo`` quotes of its points: goodput, tokens and tiers beside the rivals'. Pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

POLICIES = ("vllm", "sarathi", "slo")
STOCK, OURS = "vllm", "slo"
RIVALS = {"stock": STOCK, "sarathi": "sarathi"}  # by their names in keys
TARGET = 0.9  # attainment at which goodput is read
LEAST_SHARE = 0.95  # of a crowd that a step must run to count
SETTLING_STEPS = 4  # at the beginning of a turn, left out: the table is made anew
TIER = "attained "  # what the figure of one tier begins with
SUFFIXES = {"h200_sxm__llama-3.1-8b": "", "h100_sxm__llama-3.1-70b__tp4": "_70b_tp4"}  # of keys, by timed profile
Points = Sequence[Mapping[str, Any]]


def suffix_of(device: str, profile: str) -> str:
    """What tells the keys of a timed profile from those of the first one."""
    return SUFFIXES.get(profile, f"_{profile}") if device == "timed" else ""


def loads_of(points: Points) -> list[float]:
    return sorted({point["load"] for point in points})


def mean_of(points: Points, policy: str, load: float, what: str) -> float:
    """Mean over the seeds of one figure."""
    return statistics.fmean(p[what] for p in points if p["policy"] == policy and p["load"] == load and what in p)


def tiers_of(points: Points) -> list[str]:
    return sorted({name.removeprefix(TIER) for point in points for name in point if name.startswith(TIER)})


def goodput(points: Points, policy: str, capacity: float, whats: Sequence[str] = ("attained",)) -> float:
    """Highest rate of requests at which the mean attainment is ``TARGET``, the least of several figures (as of tiers),
    between the loads that were run."""
    loads = loads_of(points)
    means = [min(mean_of(points, policy, load, what) for what in whats) for load in loads]
    if means[0] < TARGET:
        return 0.0
    for low, high, above, below in zip(loads, loads[1:], means, means[1:], strict=False):
        if below < TARGET:
            return capacity * (low + (high - low) * (above - TARGET) / (above - below))
    return capacity * loads[-1]


def headline(points: Points, capacity: float, suffix: str = "") -> dict[str, float]:
    """The figures that the project quotes, every name with ``suffix`` at its end."""
    figures = _goodputs(points, capacity) | _attainment(points) | _work(points)
    return {f"{name}{suffix}": value for name, value in figures.items()}


def _goodputs(points: Points, capacity: float) -> dict[str, float]:
    """Goodput and its ratio to each rival's. A rival that misses the target at the least load has less than that load
    (then the ratio is a lower bound); a policy that keeps it at the greatest load has more than is told."""
    loads = loads_of(points)
    rates = {policy: goodput(points, policy, capacity) for policy in POLICIES}
    figures = {f"goodput90_{policy}_per_s": rate for policy, rate in rates.items()}
    for name, rival in RIVALS.items():
        figures[f"goodput90_ratio_vs_{name}"] = rates[OURS] / (rates[rival] or capacity * loads[0])
    if tiers := [TIER + tier for tier in tiers_of(points)]:
        own = goodput(points, OURS, capacity, tiers)
        for name, rival in RIVALS.items():
            theirs = goodput(points, rival, capacity, tiers) or capacity * loads[0]
            figures[f"goodput90_worst_tier_ratio_vs_{name}"] = own / theirs
    figures["goodput90_is_lower_bound"] = float(not all(rates[rival] for rival in RIVALS.values()))
    for policy in POLICIES:
        at_most = mean_of(points, policy, loads[-1], "attained") >= TARGET
        figures[f"goodput90_{policy}_is_at_least"] = float(at_most)
    return figures


def _attainment(points: Points) -> dict[str, float]:
    """Attainment less vLLM's by load, and of every tier."""
    loads = loads_of(points)
    tiers = tiers_of(points)
    gains = {load: _gain(points, load, "attained") for load in loads}
    figures = {"attainment_gain_worst": min(gains.values())}
    for load in loads:
        figures[f"attainment_gain_at_{load}"] = gains[load]
        for tier in tiers:
            figures[f"attained_{tier}_at_{load}"] = mean_of(points, OURS, load, TIER + tier)
            figures[f"attained_{tier}_gain_at_{load}"] = _gain(points, load, TIER + tier)
    return figures


def _gain(points: Points, load: float, what: str) -> float:
    return mean_of(points, OURS, load, what) - mean_of(points, STOCK, load, what)


def _work(points: Points) -> dict[str, float]:
    """Tokens over vLLM's, of all requests and of best effort: by load, their mean and the least."""
    figures: dict[str, float] = {}
    for what in ("tokens_per_s", "best_effort_tokens"):
        ratios = {
            load: mean_of(points, OURS, load, what) / max(mean_of(points, STOCK, load, what), 1.0)
            for load in loads_of(points)
        }
        figures[f"{what}_ratio"], figures[f"{what}_ratio_worst"] = (
            statistics.fmean(ratios.values()),
            min(ratios.values()),
        )
        figures |= {f"{what}_ratio_at_{load}": ratio for load, ratio in ratios.items()}
    return figures


def to_rich(points: Points) -> Table:
    """One line per load and policy: means over the seeds, and the spread of the attainment."""
    tiers = sorted({name for point in points for name in point if name.startswith(TIER)})
    names = ["attained", *tiers, "tokens_per_s", "best_effort_tokens", "best_effort_finished", "machine_load"]
    table = Table("load", "policy", *names, "spread")
    for load in loads_of(points):
        for policy in POLICIES:
            all_of = [p["attained"] for p in points if p["policy"] == policy and p["load"] == load]
            cells = [f"{mean_of(points, policy, load, name):.3f}" for name in names]
            table.add_row(f"{load}", policy, *cells, f"{min(all_of):.2f} to {max(all_of):.2f}")
    return table


def costs_of(turns: Points, crowd: int) -> dict[str, float]:
    """Medians over all steps with the crowd in them, microseconds; ``ratio``: what is added over vLLM's own.

    ``turns``: policy, and per step seconds that are added, seconds of vLLM's own ``schedule()``, and requests.
    """
    steps: dict[str, list[tuple[float, float]]] = {OURS: [], STOCK: []}
    for turn in turns:
        counted = [step for step in turn["steps"][SETTLING_STEPS:] if step[2] >= LEAST_SHARE * crowd]
        steps[turn["policy"]] += [(1e6 * added_s, 1e6 * own_s) for added_s, own_s, _ in counted]
    counts = {f"steps_{policy}": float(len(costs)) for policy, costs in steps.items()}
    if not all(steps.values()):  # a machine too busy to keep the crowd running
        return counts
    added_us = statistics.median(added for added, _ in steps[OURS])
    stock_us = statistics.median(own for _, own in steps[STOCK])
    return {"added_us": added_us, "stock_us": stock_us, "ratio": added_us / stock_us, **counts}


def step_headline(points: Points, suffix: str = "") -> dict[str, float]:
    """What a step costs beside vLLM's own, by the number of requests running."""
    return {f"step_cost_ratio_{point['running']}{suffix}": point["ratio"] for point in points if "ratio" in point}
