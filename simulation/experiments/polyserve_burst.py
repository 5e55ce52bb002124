"""PolyServe section 5.3: the mix of tiers is inverted halfway, which makes a fixed division of the fleet wrong."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from simulation.experiments import polyserve
from simulation.experiments.polyserve import APART, COLOCATED
from simulation.experiments.polyserve_figures import by_noise, tables
from simulation.experiments.registry import Context, Experiment, Point, Task, register
from simulation.experiments.slos_serve_figures import least_kept
from simulation.workloads.lengths import Empirical
from simulation.workloads.polyserve import SHARES, TieredLoad

NAME = "uniform_8192_2048"
STRETCH = 1.5  # of a run of an even load, so that each half has its time
LATER_SHARES = SHARES[::-1]


def load_of(_context: Context, _data_set: str) -> TieredLoad:
    """Prompts of 1 to 8192 and outputs of 1 to 2048 tokens; the shares of the tiers inverted in the second half."""
    return TieredLoad(Empirical(np.arange(1, 8193)), Empirical(np.arange(1, 2049)), later_shares=LATER_SHARES)


def config(quick: bool) -> dict[str, Any]:
    own = polyserve.config(quick)
    longer = {name: STRETCH * own[name] for name in ("lifetimes", "tuning_lifetimes")}
    place = {"data_sets": [NAME], "noise_on": [NAME], "replicas": own["replicas"][:1], "sizes": []}
    return {**own, **place, "systems": own["systems"][:-1], **longer}


def tasks(config: dict[str, Any]) -> list[Task]:
    return polyserve.tasks(config)


def run(params: Mapping[str, Any], context: Context) -> Point:
    return polyserve.measure(params, load_of(context, NAME))


def headline(points: Sequence[Point]) -> dict[str, float]:
    """The two ratios that are quoted, and those over the other rivals; under noise with its name behind."""
    figures: dict[str, tuple[str, tuple[str, ...]]] = {"goodput_ratio_colocated": ("planner", ("fixed-budget",))}
    figures["goodput_ratio_disaggregated"] = ("planner-apart", tuple(APART.keys() - {"planner-apart"}))
    for rival in COLOCATED.keys() - {"planner"}:
        figures[f"ratio_vs_{rival.replace('-', '_')}"] = ("planner", (rival,))
    found: dict[str, float] = {}
    for suffix, own in by_noise(points).items():
        known = {p["system"]: p["worst_tier"]["median"] for p in own}
        for name, (ours, rivals) in figures.items():
            if ours in known and all(rival in known for rival in rivals):
                found[f"{name}{suffix}"] = round(known[ours] / max(known[rival] for rival in rivals), 4)
        if math.isfinite(kept := least_kept(own)):
            found[f"kept_min{suffix}"] = round(kept, 4)
    return found


POLYSERVE_BURST = register(
    Experiment(
        "polyserve-burst",
        "Goodput when the mix of tiers is inverted halfway",
        config,
        tasks,
        run,
        headline,
        tables,
        lambda params, context: polyserve.behaviour_of(
            context, "splitwise", (params["system"],), params.get("noise", "exact")
        ),
    )
)
