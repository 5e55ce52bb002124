"""SLO-adaptive speculation (SLOs-Serve section 3.2.3, appendix D) against every fixed length, by acceptance rate."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from profiles.profile import Profile
from simulation.experiments.behaviour import behaviour
from simulation.experiments.registry import Context, Experiment, Point, Task, markdown_table, register
from simulation.experiments.slos_serve import DRAFT_S, GPUS, bounds_of, setting
from simulation.experiments.slos_serve_figures import geomean
from simulation.studies.capacity import MakeJobs, Search, median_and_spread
from simulation.studies.systems import PLANNER, System

ADAPTIVE = "adaptive"


def config(quick: bool) -> dict[str, Any]:
    if quick:
        return {"gpu": GPUS[0], "scenarios": ["ChatBot"], "acceptances": [0.7], "fixed": [0, 2], "max_drafts": 4,
                "programs": 300, "seeds": [1], "tolerance": 0.1}  # fmt: skip
    return {"gpu": GPUS[0], "scenarios": ["ChatBot", "Coder", "Summarizer"], "acceptances": [0.6, 0.7, 0.8],
            "fixed": [0, 1, 2, 4], "max_drafts": 6, "programs": 600, "seeds": [1, 2, 3],
            "tolerance": 0.03}  # fmt: skip


def tasks(config: dict[str, Any]) -> list[Task]:
    """One task per scenario, acceptance and length; no drafts at all do not depend on the acceptance."""
    common = {name: config[name] for name in ("gpu", "max_drafts", "programs", "seeds", "tolerance")}
    return [
        Task(f"{scenario}/{chance}/{length}", {**common, "scenario": scenario, "acceptance": chance, "length": length})
        for scenario in config["scenarios"]
        for chance in config["acceptances"]
        for length in (*config["fixed"], ADAPTIVE)
    ]


def run(params: Mapping[str, Any], context: Context) -> Point:
    """Capacity of the planner with one way to choose the number of draft tokens."""
    (profile, make), rates = _setting(params, context), []
    bound = bounds_of(profile, make, params["seeds"])["bound_fluid"]
    for seed in params["seeds"]:
        search = Search(_system(params), profile, make, seed, tolerance=params["tolerance"])
        rates.append(search.capacity("worst_tier", bound / 2))
    point = {name: params[name] for name in ("gpu", "scenario", "acceptance", "length")}
    return {**point, **median_and_spread(rates), "seeds": rates}


def _setting(params: Mapping[str, Any], context: Context) -> tuple[Profile, MakeJobs]:
    return setting(context.traces, params["gpu"], params["scenario"], params["programs"])


def _system(params: Mapping[str, Any]) -> System:
    length = params["length"]
    return replace(
        PLANNER,
        drafts=params["max_drafts"] if length == ADAPTIVE else length,
        adapts_drafts=length == ADAPTIVE,
        acceptance=params["acceptance"],
        draft_s=DRAFT_S[params["gpu"]],
    )


def behaves(params: Mapping[str, Any], context: Context) -> str:
    """What the planner with these drafts does now."""
    return behaviour(_system(params), *_setting(params, context))


def gains(points: Sequence[Point]) -> dict[tuple[str, float], tuple[float, float, int]]:
    """By scenario and acceptance: capacity of adaptive lengths, of the best fixed length, and that length."""
    found = {}
    for place in sorted({(p["scenario"], p["acceptance"]) for p in points}):
        here = {p["length"]: p["median"] for p in points if (p["scenario"], p["acceptance"]) == place}
        fixed = {length: rate for length, rate in here.items() if length != ADAPTIVE}
        if ADAPTIVE in here and fixed:
            best = max(fixed, key=lambda length: fixed[length])
            found[place] = here[ADAPTIVE], fixed[best], int(best)
    return found


def headline(points: Sequence[Point]) -> dict[str, float]:
    ratios = [adaptive / best for adaptive, best, _ in gains(points).values() if best > 0]
    plain = {p["scenario"]: p["median"] for p in points if p["length"] == 0}
    over_plain = [ours / plain[place[0]] for place, (ours, _, _) in gains(points).items() if plain.get(place[0])]
    figures = {
        "capacity_ratio_vs_best_fixed_geomean": geomean(ratios),
        "capacity_ratio_vs_none_geomean": geomean(over_plain),
    }
    return {name: round(value, 4) for name, value in figures.items() if np.isfinite(value)}


def tables(points: Sequence[Point]) -> str:
    lengths = list(dict.fromkeys(p["length"] for p in points))
    rows = [
        [scenario, chance, *(_rate(points, scenario, chance, length) for length in lengths), ours / best]
        for (scenario, chance), (ours, best, _) in gains(points).items()
    ]
    header = ("scenario", "acceptance", *(f"{length} drafts" for length in lengths), "adaptive over best fixed")
    return markdown_table(header, rows)


def _rate(points: Sequence[Point], scenario: str, chance: float, length: int | str) -> float | str:
    place = (scenario, chance, length)
    return next((p["median"] for p in points if (p["scenario"], p["acceptance"], p["length"]) == place), "not run")


SPECULATION = register(Experiment("speculation", "Speculation lengths", config, tasks, run, headline, tables, behaves))
