"""What every part of the planner is worth: capacity without it. And what binds: capacity with one bound loosened."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from profiles.profile import Profile
from simulation.experiments.behaviour import behaviour
from simulation.experiments.registry import Context, Experiment, Point, Task, markdown_table, register
from simulation.experiments.slos_serve import GPUS, bounds_of, setting
from simulation.experiments.slos_serve_figures import geomean
from simulation.studies.capacity import MakeJobs, Search, median_and_spread
from simulation.studies.systems import PLANNER, System
from simulation.workloads.settings import scaled

FULL = "planner"
PARTS = {
    FULL: PLANNER,
    "asked once": replace(PLANNER, reconsiders=False),
    "no displacing": replace(PLANNER, displace=False),
    "no admission": System("no-admission", sheds=True),
    "batch size fixed at 512": replace(PLANNER, token_budget=512),
    "batch size fixed at 2048": replace(PLANNER, token_budget=2048),
    "no best-effort tier": replace(PLANNER, drops_refused=True),
    "true lengths known": replace(PLANNER, is_oracle=True),
    "model 10 % optimistic": replace(PLANNER, believed_speed=1.1),
    "model 10 % pessimistic": replace(PLANNER, believed_speed=1 / 1.1),
}
LOOSENED = {"TTFT": ("ttft_s",), "TPOT": ("tpot_s", "later_tpot_s")}


def config(quick: bool) -> dict[str, Any]:
    if quick:
        return {"gpu": GPUS[0], "scenarios": ["Coder"], "parts": [FULL, "asked once", "no admission"],
                "loosened": ["Reasoning"], "factors": [2.0], "programs": 300, "seeds": [1],
                "tolerance": 0.1}  # fmt: skip
    return {"gpu": GPUS[0], "scenarios": ["ChatBot", "Coder", "Summarizer"], "parts": list(PARTS),
            "loosened": ["ChatBot", "Summarizer", "Reasoning"], "factors": [2.0, 4.0], "programs": 600,
            "seeds": [1, 2, 3], "tolerance": 0.03}  # fmt: skip


def tasks(config: dict[str, Any]) -> list[Task]:
    common = {name: config[name] for name in ("gpu", "programs", "seeds", "tolerance")}
    parts = [
        Task(f"{scenario}/{part}", {**common, "scenario": scenario, "part": part, "loosen": "", "factor": 1.0})
        for scenario in config["scenarios"]
        for part in config["parts"]
    ]
    bounds = [
        Task(
            f"{scenario}/{what} x{factor}",
            {**common, "scenario": scenario, "part": FULL, "loosen": what, "factor": factor},
        )
        for scenario in config["loosened"]
        for what in LOOSENED
        for factor in config["factors"]
    ]
    return [*parts, *bounds]


def run(params: Mapping[str, Any], context: Context) -> Point:
    profile, make = _setting(params, context)
    bound, rates = bounds_of(profile, make, params["seeds"])["bound"], []
    for seed in params["seeds"]:
        search = Search(PARTS[params["part"]], profile, make, seed, tolerance=params["tolerance"])
        rates.append(search.capacity("worst_tier", bound / 2))
    point = {name: params[name] for name in ("scenario", "part", "loosen", "factor")}
    return {**point, "bound": bound, **median_and_spread(rates), "seeds": rates}


def _setting(params: Mapping[str, Any], context: Context) -> tuple[Profile, MakeJobs]:
    """Hardware and jobs of the scenario, with one objective loosened where the task says so."""
    profile, plain = setting(context.traces, params["gpu"], params["scenario"], params["programs"])
    if not params["loosen"]:
        return profile, plain
    factors = dict.fromkeys(LOOSENED[params["loosen"]], params["factor"])
    return profile, lambda rate_per_s, seed: scaled(plain(rate_per_s, seed), factors)


def behaves(params: Mapping[str, Any], context: Context) -> str:
    """What the planner without the part does now."""
    return behaviour(PARTS[params["part"]], *_setting(params, context))


def headline(points: Sequence[Point]) -> dict[str, float]:
    """Capacity without each part over that with all, the geometric mean over scenarios and seeds."""
    full = {p["scenario"]: p["seeds"] for p in points if p["part"] == FULL and not p["loosen"]}
    figures = {}
    for part in dict.fromkeys(p["part"] for p in points if p["part"] != FULL):
        ratios = [
            without / whole
            for p in points
            if p["part"] == part and p["scenario"] in full
            for without, whole in zip(p["seeds"], full[p["scenario"]], strict=True)
            if whole > 0 and without > 0
        ]
        if ratios:
            figures[f"capacity_ratio {part}"] = round(geomean(ratios), 4)
    return figures


def tables(points: Sequence[Point]) -> str:
    scenarios = list(dict.fromkeys(p["scenario"] for p in points if not p["loosen"]))
    full = {p["scenario"]: p["median"] for p in points if p["part"] == FULL and not p["loosen"]}
    rows = []
    for part in dict.fromkeys(p["part"] for p in points if not p["loosen"]):
        own = {p["scenario"]: p["median"] for p in points if p["part"] == part and not p["loosen"]}
        rows.append([part, *(_cell(own.get(s), full.get(s)) for s in scenarios)])
    bounds = [
        [p["scenario"], f"{p['loosen']} x{p['factor']:g}", p["median"], p["bound"], p["median"] / p["bound"]]
        for p in points
        if p["loosen"]
    ]
    header = ("scenario", "loosened", "req/s", "bound", "of the bound")
    return markdown_table(("variant", *scenarios), rows) + "\n\n" + markdown_table(header, bounds)


def _cell(rate: float | None, full: float | None) -> str:
    """Capacity without a part, and over that with all."""
    if rate is None or not full:
        return "not run"
    return f"{rate:.3g} ({rate / full:.2f}x)"


ABLATIONS = register(Experiment("ablations", "What each part is worth", config, tasks, run, headline, tables, behaves))
