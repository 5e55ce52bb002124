"""Promises on engines that stray from their profiles: capacity, and the share of promises that are kept.

The planner is the live controller's ``Fleet`` over one replica. Every system's model of the engine learns from the
iterations it sees. EDF with shedding sizes iterations by deadlines too and has the slack margin that serves it best.
With two iterations in flight stock engines form them at once, as vLLM does; with ``LATE`` to their names, as ours do.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from profiles.profile import Profile
from simulation.experiments.behaviour import behaviour
from simulation.experiments.registry import Context, Experiment, Point, Task, markdown_table, register
from simulation.experiments.slos_serve import DRAFT_S, GPUS, SYSTEMS, bounds_of, setting
from simulation.experiments.slos_serve_figures import STOCK, geomean
from simulation.experiments.tuning import tuned_capacity, tuned_over, variants
from simulation.studies.capacity import MakeJobs
from simulation.studies.promised import OVERLOAD, promises_at
from simulation.studies.systems import NOISES, FleetOf, System
from simulation.workloads.scenarios import BURSTY, SCENARIOS

LIVE, LATE = "live", ", late"


def config(quick: bool) -> dict[str, Any]:
    if quick:
        return {"gpu": GPUS[0], "scenarios": ["Coder"], "noises": ["exact", "noise10"], "programs": 200, "seeds": [1],
                "systems": [LIVE, "no-admission", "sarathi"], "budgets": [2048], "tolerance": 0.2}  # fmt: skip
    return {"gpu": GPUS[0], "scenarios": list(SCENARIOS), "noises": ["exact", "noise10", "noise20", "slow10", "ahead"],
            "programs": 400, "seeds": [1, 2, 3], "trace_arrivals": 4410, "budgets": [512, 1024, 2048, 4096],
            "systems": [LIVE, "no-admission", "edf-shed", *STOCK], "tolerance": 0.04}  # fmt: skip


def tasks(config: dict[str, Any]) -> list[Task]:
    """One task per scenario, noise and system; the planner, which takes longest, last."""
    common = {name: config[name] for name in ("gpu", "budgets", "tolerance")}
    found = [
        Task(
            f"{scenario}/{noise}/{system}",
            {**common, **_played(config, scenario), **_named(system), "scenario": scenario, "noise": noise},
        )
        for scenario in config["scenarios"]
        for noise in config["noises"]
        for system in _systems(config, noise)
    ]
    return sorted(found, key=lambda task: task.params["system"] == LIVE)


def _systems(config: dict[str, Any], noise: str) -> list[str]:
    late = [system + LATE for system in config["systems"] if system in STOCK]
    return [*config["systems"], *(late if NOISES[noise].steps_in_flight > 1 else [])]


def _named(system: str) -> dict[str, Any]:
    return {"system": system, **({} if system == LIVE else tuned_over(SYSTEMS[system.removesuffix(LATE)]))}


def _played(config: dict[str, Any], scenario: str) -> dict[str, Any]:
    """Programs and seeds. Half of the coding trace, once: capacities of shorter parts differ by up to five times."""
    if scenario not in BURSTY or "trace_arrivals" not in config:
        return {name: config[name] for name in ("programs", "seeds")}
    return {"programs": config["trace_arrivals"] * len(SCENARIOS[scenario]), "seeds": config["seeds"]}


def run(params: Mapping[str, Any], context: Context) -> Point:
    """Tuned capacity, and promises at the capacity of each seed and at ``OVERLOAD`` times it."""
    profile, make = _setting(params, context)
    bound = bounds_of(profile, make, params["seeds"])["bound_fluid"]
    told = {**params, "target": 0.9, "drafts": [0]}
    found = tuned_capacity(_system(params), profile, make, make, bound, told)
    chosen = variants(_system(params), params["budgets"], [0])[found["setting"]]
    rates = list(zip(params["seeds"], found["worst_tier"]["seeds"], strict=True))
    point = {name: params[name] for name in ("scenario", "noise", "system")}
    point |= promises_at(chosen, profile, make, rates)
    return {**point, "setting": found["setting"], "bound_fluid": bound, **found["worst_tier"]}


def _setting(params: Mapping[str, Any], context: Context) -> tuple[Profile, MakeJobs]:
    return setting(context.traces, params["gpu"], params["scenario"], params["programs"])


def _system(params: Mapping[str, Any]) -> System:
    live = FleetOf(LIVE, admits=True, replicas=1, names_sessions=True)
    system = live if params["system"] == LIVE else SYSTEMS[params["system"].removesuffix(LATE)]
    forms_late = params["system"] not in STOCK
    return replace(system, straying=NOISES[params["noise"]], draft_s=DRAFT_S[params["gpu"]], forms_late=forms_late)


def behaves(params: Mapping[str, Any], context: Context) -> str:
    """What the system does now on engines that stray so."""
    return behaviour(_system(params), *_setting(params, context))


def _kept(point: Point, where: str) -> float:
    _asked, promised, kept = point[where]
    return kept / promised if promised else float("nan")


def headline(points: Sequence[Point]) -> dict[str, float]:
    """Per noise: the least share of promises kept, and capacity over the best stock engine and over no admission."""
    figures, noises = {}, list(dict.fromkeys(p["noise"] for p in points))
    rates = {(p["noise"], p["scenario"], p["system"]): p["median"] for p in points}
    exact = {scenario: rate for (noise, scenario, system), rate in rates.items() if (noise, system) == ("exact", LIVE)}
    for noise in noises:
        own = [p for p in points if p["noise"] == noise and p["system"] == LIVE]
        suffix = "" if noise == "exact" else f"_{noise}"
        shares = [_kept(p, where) for p in own for where in ("at_capacity", "overload")]
        figures[f"kept_min{suffix}"] = min(shares, default=float("nan"))
        over = {p["scenario"]: _over(rates, p, ("no-admission",)) for p in own}
        stock = [_over(rates, p, STOCK) for p in own]
        figures[f"capacity_ratio_vs_best_geomean{suffix}"] = geomean(stock)
        rivals = [*STOCK, "edf-shed", *(system + LATE for system in STOCK)]
        figures[f"capacity_ratio_vs_best_rival_geomean{suffix}"] = geomean([_over(rates, p, rivals) for p in own])
        late = [_over(rates, p, [system + LATE for system in STOCK]) for p in own]
        figures[f"capacity_ratio_vs_best_late_geomean{suffix}"] = geomean(late)
        figures[f"capacity_ratio_vs_shed_min{suffix}"] = min(
            (_over(rates, p, ("edf-shed",)) for p in own), default=float("nan")
        )
        figures[f"capacity_ratio_vs_no_admission_min{suffix}"] = min(over.values(), default=float("nan"))
        bursty = [ratio for scenario, ratio in over.items() if scenario in BURSTY]
        figures[f"capacity_ratio_vs_no_admission_bursty{suffix}"] = geomean(bursty)
        if noise != "exact":
            kept = [p["median"] / exact[p["scenario"]] for p in own if exact.get(p["scenario"])]
            figures[f"capacity_over_exact{suffix}"] = geomean(kept)
    return {name: round(value, 4) for name, value in figures.items() if np.isfinite(value)}


def _over(rates: Mapping[tuple[str, str, str], float], point: Point, rivals: Sequence[str]) -> float:
    """Capacity over the best of the rivals in the same scenario under the same noise; nan where none was run."""
    known = [rates.get((point["noise"], point["scenario"], rival), 0.0) for rival in rivals]
    return float(point["median"] / max(known)) if max(known) > 0 else float("nan")


def tables(points: Sequence[Point]) -> str:
    """Capacity per scenario, noise and system, with the promises of those that make any."""
    noises = list(dict.fromkeys(p["noise"] for p in points))
    rows: list[list[object]] = []
    for scenario, system in dict.fromkeys((p["scenario"], p["system"]) for p in points):
        own = {p["noise"]: p for p in points if (p["scenario"], p["system"]) == (scenario, system)}
        rows.append([scenario, system, *(own[noise]["median"] if noise in own else "not run" for noise in noises)])
    parts = [markdown_table(("scenario", "system", *(f"req/s, {noise}" for noise in noises)), rows)]
    rows = [
        [p["scenario"], p["noise"], f"{p['low']:.3g} to {p['high']:.3g}"]
        + [f"{_kept(p, where):.3f} of {p[where][1]}, {p[where][0]} asked" for where in ("at_capacity", "overload")]
        for p in points
        if p["system"] == LIVE
    ]
    header = ("scenario", "noise", "req/s over seeds", "kept at capacity", f"kept at {OVERLOAD} times that")
    return "\n\n".join([*parts, "### Promises of the planner\n\n" + markdown_table(header, rows)])


PROMISES = register(
    Experiment("promises", "Promises on engines that stray", config, tasks, run, headline, tables, behaves)
)
