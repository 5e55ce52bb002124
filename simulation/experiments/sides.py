"""Prefill and decode sides under a load that flips from long prompts to long outputs, adapted or in a fixed ratio."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from controller.disaggregation.phases import PhaseOptions
from controller.options import FleetOptions
from profiles.store import load_profile
from simulation.core.loop import Simulation
from simulation.dispatchers.disaggregated import DisaggregatedDispatcher
from simulation.dispatchers.live_fleet import tiers_of
from simulation.experiments.registry import Context, Experiment, Point, Task, markdown_table, register
from simulation.experiments.sides_sized import Sized, attained_by_half, figures, moves, simulate, swinging_jobs
from simulation.experiments.what_if import mixed_jobs
from simulation.studies.capacity import median_and_spread
from simulation.studies.systems import FleetOf
from simulation.workloads.settings import join
from simulation.workloads.split import split_jobs_over_link
from simulation.workloads.traces import read_trace

GPU = "a100_sxm__llama-3.1-8b"
HALVES = ("azure_2023_code", "azure_2023_conv")  # 2048 prompt and 28 output tokens in the mean, then 1155 and 211
AS_GOOD = 0.99  # of what the fleet attains whose size follows the load
SMALL_SWING = {"rates": [6.0, 6.0], "half_s": 40.0, "cold_s": 5.0}
SMALL = {"replicas": 3, "prefill": 1, "rates": (14.0, 14.0), "half_s": 8.0}  # shows a change of behaviour


SWINGS = {"rates": [8.0, 8.0], "half_s": 480.0, "cold_s": 20.0}
SPLITS = ["2:1", "2:2", "3:1", "3:2"]  # prefill to decode, of fixed fleets under the load that swings


def config(quick: bool) -> dict[str, Any]:
    if quick:
        return {"replicas": 4, "prefills": [2], "adapted": [2], "rates": [16.0, 16.0], "half_s": 30.0, "seeds": [1],
                "swings": {**SWINGS, "half_s": 60.0}, "splits": [], "sized": ["1:1"], "swing_seeds": [1]}  # fmt: skip
    return {"replicas": 6, "prefills": [2, 3, 4, 5], "adapted": [2, 3, 4], "rates": [30.0, 29.0], "half_s": 120.0,
            "seeds": [1, 2, 3], "swings": SWINGS, "splits": SPLITS, "sized": ["2:1"], "swing_seeds": [1]}  # fmt: skip


def tasks(config: dict[str, Any]) -> list[Task]:
    """One task per ratio that a fleet begins with, and keeps or adapts; and per fleet under the load that swings."""
    settings = {name: config[name] for name in ("replicas", "rates", "half_s", "seeds")}
    wanted = [("fixed", False, prefill) for prefill in config["prefills"]]
    wanted += [("adapted from", True, prefill) for prefill in config["adapted"]]
    flips = [Task(f"{name} {n}", {**settings, "adapts": adapts, "prefill": n}) for name, adapts, n in wanted]
    swings = {**config["swings"], "seeds": config["swing_seeds"]}
    fleets = [("sized from", True, split) for split in config["sized"]]
    fleets += [("swing fixed", False, split) for split in config["splits"]]
    return flips + [Task(f"{name} {split}", {**swings, "grows": g, "split": split}) for name, g, split in fleets]


def run(params: Mapping[str, Any], context: Context) -> Point:
    """Attainment before and after the flip, over seeds."""
    swings = "split" in params
    runs = [
        figures(_swing(params, context, seed)) if swings else flip_figures(_simulate(params, context, seed))
        for seed in params["seeds"]
    ]
    found = {
        name: {**median_and_spread(values), "seeds": values}
        for name in runs[0]
        for values in [[float(each[name]) for each in runs]]
    }
    if swings:
        return {"grows": params["grows"], "split": params["split"], **found}
    return {"adapts": params["adapts"], "prefill": params["prefill"], "replicas": params["replicas"], **found}


def _swing(params: Mapping[str, Any], context: Context, seed: int) -> Simulation:
    """Both halves of the load that swings: the size and the ratio follow it, or neither does."""
    prefill, decode = map(int, params["split"].split(":"))
    sized = Sized(prefill, prefill + decode, params["grows"], params["grows"], params["cold_s"])
    return simulate(sized, swinging_jobs(params, context, HALVES, seed), GPU, seed)


def _simulate(params: Mapping[str, Any], context: Context, seed: int) -> Simulation:
    """Both halves of the load, run to their end."""
    parts, half_s = [], params["half_s"]
    for half, (name, rate) in enumerate(zip(HALVES, params["rates"], strict=True)):
        trace = read_trace(context.traces / f"{name}.parquet")
        jobs = mixed_jobs(trace, round(rate * half_s), rate, 10 * seed + half)
        jobs["arrival_s"] += half * half_s
        parts.append(jobs)
    jobs, profile = join(parts), load_profile(GPU)
    options = FleetOptions(seed=seed, phases=PhaseOptions(params["prefill"], adapt=params["adapts"]))
    engines = FleetOf("sides", replicas=params["replicas"]).engines(profile, seed)
    simulation = Simulation(
        split_jobs_over_link(jobs), engines, DisaggregatedDispatcher(profile, tiers_of(jobs), options)
    )
    simulation.run()
    return simulation


def flip_figures(simulation: Simulation) -> dict[str, float]:
    dispatcher = simulation.dispatcher
    assert isinstance(dispatcher, DisaggregatedDispatcher)
    requests = (simulation.jobs["prefilled"] == 0).sum()
    _, told = attained_by_half(simulation)
    return {**told, "apart": dispatcher.moved / requests, "moves": moves(dispatcher.fleet)}


def behaves(params: Mapping[str, Any], context: Context) -> str:
    """Digest of what a small fleet of this kind does."""
    if "split" in params:
        records = _swing({**params, **SMALL_SWING}, context, 1).records
    else:
        records = _simulate({**SMALL, "adapts": params["adapts"]}, context, 1).records
    return hashlib.blake2b(records.tobytes(), digest_size=8).hexdigest()


def headline(points: Sequence[Point]) -> dict[str, float]:
    """Share attained over both halves: adapted, from its worst beginning, and in the best and the worst fixed ratio.

    Under the load that swings: cost of the size that follows it over the cheapest fixed fleet that attains as much.
    """
    flips, swings = [p for p in points if "split" not in p], [p for p in points if "split" in p]
    adapted, fixed = ([p["overall"]["median"] for p in flips if p["adapts"] == adapts] for adapts in (True, False))
    told = {"adapted_worst": min(adapted), "adapted_best": max(adapted)} if adapted else {}
    told |= {"fixed_best": max(fixed), "fixed_worst": min(fixed)} if fixed else {}
    for sized in (p for p in swings if p["grows"]):
        as_good = [
            p["cost_s"]["median"]
            for p in swings
            if not p["grows"] and p["overall"]["median"] >= AS_GOOD * sized["overall"]["median"]
        ]
        told["sized_attained"] = sized["overall"]["median"]
        if as_good:
            told["sized_over_best_fixed"] = sized["cost_s"]["median"] / min(as_good)
    return {name: round(value, 4) for name, value in told.items()}


def tables(points: Sequence[Point]) -> str:
    """Of the load that flips, then of the one that swings too."""
    flips, swings = [p for p in points if "split" not in p], [p for p in points if "split" in p]
    return "\n\n".join(table(part) for table, part in ((_flip_table, flips), (_swing_table, swings)) if part)


def _swing_table(points: Sequence[Point]) -> str:
    rows = [
        [
            f"{'sized from ' if p['grows'] else ''}{p['split']}",
            p["replicas_paid"]["median"],
            f"{1e3 * p['cost_s']['median']:.0f}",
            *(f"{p[name]['median']:.3f}" for name in ("first", "second", "overall", "worst_tier")),
            *(int(p[name]["median"]) for name in ("resizes", "moves")),
        ]
        for p in points
    ]
    header = ("prefill:decode", "replicas", "replica-ms per attained request", "long prompts", "long outputs", "both")
    return markdown_table((*header, "worst tier", "resizes", "moves"), rows)


def _flip_table(points: Sequence[Point]) -> str:
    def cell(figure: Mapping[str, float]) -> str:
        return f"{figure['median']:.3f} ({figure['low']:.3f} to {figure['high']:.3f})"

    rows = [
        [
            f"{'adapted from ' if p['adapts'] else ''}{p['prefill']}:{p['replicas'] - p['prefill']}",
            *(cell(p[name]) for name in ("first", "second", "overall", "worst_tier")),
            p["apart"]["median"],
            int(p["moves"]["median"]),
        ]
        for p in points
    ]
    header = ("prefill:decode", "long prompts", "long outputs", "both", "worst tier", "moved over the link", "moves")
    return markdown_table(header, rows)


SIDES = register(
    Experiment("sides", "Prefill and decode sides when the load flips", config, tasks, run, headline, tables, behaves)
)
