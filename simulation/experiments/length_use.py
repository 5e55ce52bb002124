"""Which length is best where: a mean or a bound for time, and for KV room, where the KV cache is short.

One replica under the live controller's ``Fleet``, on engines that stray. Its KV cache is a part of the profile's, so
that room for outputs decides what can be promised.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from controller.lengths.estimate import ORACLE, LengthOptions
from profiles.profile import Profile
from simulation.core.metrics import Window, attained
from simulation.experiments.behaviour import behaviour
from simulation.experiments.registry import Context, Experiment, Point, Task, markdown_table, register
from simulation.experiments.slos_serve import DRAFT_S, GPUS, bounds_of, setting
from simulation.studies.capacity import MakeJobs, run_system
from simulation.studies.systems import NOISES, FleetOf, System

SHIPPED = "tier_mean/mean/mean"
VARIANTS = {
    f"{estimator}/{time}/{kv_room}": LengthOptions(estimator, time=time, kv_room=kv_room)
    for estimator, time, kv_room in (
        ("tier_mean", "mean", "mean"),
        ("tier_mean", "mean", "pooled"),
        ("tier_mean", "mean", "bound"),
        ("tier_mean", "bound", "mean"),
        ("forest", "mean", "mean"),
        ("forest", "mean", "pooled"),
        ("none", "mean", "mean"),
        (ORACLE, "mean", "mean"),
    )
}


def config(quick: bool) -> dict[str, Any]:
    common = {"gpu": GPUS[0], "noise": "noise10", "kv_share": 0.25}
    if quick:
        return {**common, "scenarios": ["ChatBot"], "loads": [1.0], "programs": 150, "seeds": [1],
                "variants": list(VARIANTS)[:3]}  # fmt: skip
    return {**common, "scenarios": ["ChatBot", "Reasoning"], "loads": [0.7, 1.1], "programs": 300, "seeds": [1, 2, 3],
            "variants": list(VARIANTS)}  # fmt: skip


def tasks(config: dict[str, Any]) -> list[Task]:
    """One task per scenario, load and variant."""
    common = {name: config[name] for name in ("gpu", "noise", "kv_share", "programs", "seeds")}
    return [
        Task(f"{scenario}/{load}/{variant}", {**common, "scenario": scenario, "load": load, "variant": variant})
        for scenario in config["scenarios"]
        for load in config["loads"]
        for variant in config["variants"]
    ]


def run(params: Mapping[str, Any], context: Context) -> Point:
    """Judged, promised and kept programs of all seeds together, and preemptions."""
    profile, make = _setting(params, context)
    rate = params["load"] * bounds_of(profile, make, params["seeds"])["bound_fluid"]
    counts = [_counts(_system(params), profile, make(rate, seed), seed) for seed in params["seeds"]]
    judged, met, promised, kept, preempted = (sum(count) for count in zip(*counts, strict=True))
    figures = {"judged": judged, "met": met, "promised": promised, "kept": kept, "preemptions": preempted}
    return {**{name: params[name] for name in ("scenario", "load", "variant")}, **figures}


def _counts(system: System, profile: Profile, jobs: np.ndarray, seed: int) -> tuple[int, int, int, int, int]:
    simulation = run_system(system, profile, jobs, seed)
    jobs, records = simulation.jobs, simulation.records
    heads = Window.of(jobs).first_requests(jobs)
    unpromised = np.bincount(jobs["program"], weights=~records["promised"] & ~jobs["best_effort"], minlength=len(jobs))
    is_promised, met = unpromised[heads] == 0, attained(jobs, records)["dslo"][heads]
    kept = int((met & is_promised).sum())
    return len(heads), int(met.sum()), int(is_promised.sum()), kept, int(records["preemptions"].sum())


def _setting(params: Mapping[str, Any], context: Context) -> tuple[Profile, MakeJobs]:
    profile, make = setting(context.traces, params["gpu"], params["scenario"], params["programs"])
    return replace(profile, kv_capacity_tokens=int(params["kv_share"] * profile.kv_capacity_tokens)), make


def _system(params: Mapping[str, Any]) -> System:
    system = FleetOf("live", admits=True, replicas=1, lengths=VARIANTS[params["variant"]])
    return replace(system, straying=NOISES[params["noise"]], draft_s=DRAFT_S[params["gpu"]])


def behaves(params: Mapping[str, Any], context: Context) -> str:
    """What the fleet does now with these lengths."""
    return behaviour(_system(params), *_setting(params, context))


def _share(points: Sequence[Point], over: str, under: str) -> float:
    total = sum(p[under] for p in points)
    return sum(p[over] for p in points) / total if total else float("nan")


def headline(points: Sequence[Point]) -> dict[str, float]:
    """Per variant: programs met over those met with the shipped setting, and the share of promises kept."""
    base = _share([p for p in points if p["variant"] == SHIPPED], "met", "judged")
    figures = {}
    for variant in dict.fromkeys(p["variant"] for p in points):
        own, name = [p for p in points if p["variant"] == variant], variant.replace("/", "_")
        figures[f"met_ratio_{name}"] = _share(own, "met", "judged") / base if base else float("nan")
        figures[f"kept_{name}"] = _share(own, "kept", "promised")
    return {name: round(value, 4) for name, value in figures.items() if np.isfinite(value)}


def tables(points: Sequence[Point]) -> str:
    rows = []
    for p in points:
        estimator, time, kv_room = p["variant"].split("/")
        shares = _share([p], "met", "judged"), _share([p], "promised", "judged"), _share([p], "kept", "promised")
        rows.append([p["scenario"], p["load"], estimator, time, kv_room, *shares, p["preemptions"]])
    header = ("scenario", "load", "estimator", "time by", "KV room for", "met", "promised", "kept", "preemptions")
    return markdown_table(header, rows)


LENGTH_USE = register(Experiment("length-use", "Means and bounds", config, tasks, run, headline, tables, behaves))
