"""``polyslo simulate``, ``polyslo plan`` and ``polyslo reproduce``: what a fleet would do, before it is rented."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from profiles.profile import Profile
from profiles.store import load_profile
from serving.cli import scenario as scenarios
from serving.cli import simulate_plots, simulate_tables
from serving.cli.outputs import check_folders, make_folder
from serving.cli.plan_groups import check_judged, check_plan, groups_of, only_class
from serving.cli.reproduce import RunOptions, run_experiment
from serving.tables import table_console
from simulation.core.loop import Dispatcher, Simulation
from simulation.core.metrics import Window, summarize
from simulation.core.prefix_cache import PrefixCache
from simulation.dispatchers.placement import BalancerDispatcher, KernelDispatcher
from simulation.experiments.registry import experiment, experiment_names
from simulation.studies.capacity import median_and_spread
from simulation.studies.sizing import judged_programs, least_replicas, replicas_needed
from simulation.workloads.traces import Trace

console = table_console(0)
DEFAULT_TRACES = Path("../shared/traces")

Traces = Annotated[Path, typer.Option("--traces", help="folder with traces, by name")]
JsonOut = Annotated[Path | None, typer.Option("--json", help="write the result here")]


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)


def simulate(
    path: Annotated[Path, typer.Argument(metavar="SCENARIO", help="scenario file (YAML)")],
    traces: Traces = DEFAULT_TRACES,
    json_out: JsonOut = None,
    plots: Annotated[Path | None, typer.Option(help="folder for pictures")] = None,
) -> None:
    """Run a scenario in virtual time: who would get what."""
    make_folder(plots)
    check_folders(json_out)
    asked = scenarios.read_scenario(path)
    profile, trace = load_profile(asked.profile), scenarios.trace_of(asked, path, traces)
    points, last, names = [], None, [section.name for section in asked.classes]
    with _progress() as bar:
        runs = [(rate, seed) for rate in asked.rates_per_s for seed in asked.seeds]
        for rate, seed in runs:
            jobs, edges = scenarios.make_jobs(asked, trace, traces, profile, rate, seed)
            task = bar.add_task(f"{rate:g} req/s, seed {seed}", total=len(jobs))
            started_s = time.perf_counter()
            sampled: list[tuple[float, list[int]]] = []

            def show(done: int, task: TaskID = task) -> None:
                bar.update(task, completed=done)

            last = _run(asked, profile, Workload(jobs, edges, trace), seed, show, sampled)
            figures = summarize(last.jobs, last.records, last.engines.state, Window.of(last.jobs))
            points.append({"rate_per_s": rate, "seed": seed, **figures, "wall_s": time.perf_counter() - started_s})
            if plots is not None and (rate, seed) == runs[-1]:
                simulate_plots.latencies(last, names, plots / f"{asked.name}-latency.png")
                simulate_plots.load(sampled, plots / f"{asked.name}-load.png")
    console.print(simulate_tables.simulated(asked.name, points, names))
    if plots is not None:
        simulate_plots.attainment(points, names, plots / f"{asked.name}-attainment.png")
    if json_out is not None:
        result = {"name": f"simulate-{asked.name}", "config": asked.model_dump(), "seeds": asked.seeds}
        judged = [share for p in points if (share := p["attainment"]["dslo"]) is not None]
        headline = {"attainment": float(np.median(judged)) if judged else None}
        json_out.write_text(json.dumps({**result, "headline": headline, "points": points}, indent=1) + "\n")


class Workload(NamedTuple):
    """What is asked for in one run."""

    jobs: np.ndarray
    edges: np.ndarray
    trace: Trace | None


def _dispatcher(
    asked: scenarios.Scenario, profile: Profile, jobs: np.ndarray, trace: Trace | None, seed: int
) -> Dispatcher:
    system = asked.chosen_system()
    routing = asked.placement
    if routing in scenarios.CONTROLLED:
        return asked.fleet(trace).dispatcher(profile, jobs, seed)
    if asked.num_replicas == 1:
        return system.dispatcher(profile, jobs, seed)
    if routing == "kernel" and system.admits:
        return KernelDispatcher()
    return BalancerDispatcher("round_robin" if routing == "kernel" else routing, seed)


def _run(
    asked: scenarios.Scenario,
    profile: Profile,
    workload: Workload,
    seed: int,
    show: Callable[[int], None],
    sampled: list[tuple[float, list[int]]],
) -> Simulation:
    """One run; calls ``show`` and samples the load of the replicas now and then."""
    system, (jobs, edges, trace) = asked.chosen_system(), workload
    prefixes = (
        PrefixCache(trace.blocks, trace.block_tokens, jobs, asked.num_replicas)
        if trace is not None and len(trace.blocks)
        else None
    )
    dispatcher = _dispatcher(asked, profile, jobs, trace, seed)
    simulation = Simulation(jobs, system.engines(profile, seed), dispatcher, prefixes=prefixes, edges=edges)
    calls, every = 0, max(1, len(jobs) // 400)

    def watch(running: Simulation) -> bool:
        nonlocal calls
        calls += 1
        if calls % every == 0:
            show(len(jobs) - running.left)
            sampled.append((running.now_s, running.engines.state["count"].tolist()))
        return False

    simulation.run(watch)
    show(len(jobs) - simulation.left)
    return simulation


def plan(  # noqa: PLR0913  (a command: its options)
    path: Annotated[Path, typer.Argument(metavar="SCENARIO", help="scenario file (YAML) whose trace is planned for")],
    target: Annotated[float, typer.Option(min=0.01, max=0.999, help="attainment that every class must reach")] = 0.95,
    profile: Annotated[list[str] | None, typer.Option(help="GPU kinds to compare; default: the scenario's")] = None,
    price: Annotated[
        list[float] | None,
        typer.Option(help="what a replica of each of them costs per hour, all its GPUs together; default: 1"),
    ] = None,
    apart: Annotated[bool, typer.Option("--apart", help="also plan a fleet of its own for each class")] = False,
    traces: Traces = DEFAULT_TRACES,
    json_out: JsonOut = None,
) -> None:
    """How many replicas a workload needs, of which GPU, at what cost per attained request."""
    check_folders(json_out)
    asked = scenarios.read_scenario(path)
    check_plan(asked, str(path), apart)
    trace, points = scenarios.trace_of(asked, path, traces), []
    kinds = profile or [asked.profile]
    prices = price or [1.0] * len(kinds)
    if len(prices) != len(kinds):
        raise ValueError(f"--price: needs one for each of {len(kinds)} profiles, got {len(prices)}")
    if wrong := [each for each in prices if not 0 <= each < math.inf]:
        raise ValueError(f"--price: must be a number from 0, got {wrong[0]:g}")
    make_jobs = partial(scenarios.make_jobs, asked, trace, traces)
    profiles, groups = [load_profile(kind) for kind in kinds], groups_of(asked, apart)
    check_judged(asked, str(path), groups, partial(make_jobs, profiles[0]))
    with _progress() as bar:
        for loaded, hourly in zip(profiles, prices, strict=True):
            for rate in asked.rates_per_s:
                for who, number in groups:
                    what = f"{loaded.name} {who} {rate:g} req/s"
                    task = bar.add_task(what, total=len(asked.seeds))

                    def tell(count: int, what: str = what, task: TaskID = task) -> None:
                        bar.update(task, description=f"{what}, {count} replicas")

                    found, count = [], 0
                    for seed in bar.track(asked.seeds, task_id=task):
                        jobs, edges = make_jobs(loaded, rate, seed)
                        work = Workload(only_class(jobs, number), edges, trace)
                        count += len(work.jobs)
                        found.append(_sized(asked, loaded, work, seed, (target, hourly / 3600.0), tell))
                    point: dict[str, Any] = {"profile": loaded.name, "class": who, "rate_per_s": rate}
                    if number >= 0:
                        point["class_rate_per_s"] = rate * count / (asked.requests * len(asked.seeds))
                    points.append(point | _needed(found))
    console.print(simulate_tables.planned(points, target))
    if json_out is not None:
        result = {"name": f"plan-{asked.name}", "config": {**asked.model_dump(), "target": target}}
        keys = [f"replicas {p['profile']} {p['class']} {p['rate_per_s']:g}" for p in points]
        headline = {key: p["replicas"]["median"] for key, p in zip(keys, points, strict=True)}
        json_out.write_text(json.dumps({**result, "seeds": asked.seeds, "headline": headline, "points": points}) + "\n")


def _sized(
    asked: scenarios.Scenario,
    profile: Profile,
    workload: Workload,
    seed: int,
    wanted: tuple[float, float],
    tell: Callable[[int], None],
) -> tuple[int, float, float]:
    """What ``replicas_needed`` says of the scenario's system and routing; ``wanted``: target, and price per second.

    ``tell`` gets each number of replicas that is tried.
    """
    target, price = wanted
    judged_programs(workload.jobs)  # or an error before the run
    holds_prefixes = workload.trace is not None and len(workload.trace.blocks) > 0  # prompts are less work then

    def play(count: int) -> Simulation:
        tell(count)
        return _run(asked.model_copy(update={"num_replicas": count}), profile, workload, seed, lambda _done: None, [])

    least = 1 if holds_prefixes else least_replicas(workload.jobs, profile, target)
    return replicas_needed(play, target, price, least=least)


def _needed(found: list[tuple[int, float, float]]) -> dict[str, Any]:
    """Replicas, attainment and cost, median and spread over seeds; 0 replicas where not even the most were enough for
    every seed, and no cost then."""
    replicas, attainments, costs = zip(*found, strict=True)
    is_enough = all(replicas)
    return {
        "replicas": median_and_spread([float(count) if is_enough else 0.0 for count in replicas]),
        "attainment": median_and_spread(list(attainments)),
        "cost_per_request": median_and_spread(list(costs)) if is_enough else None,
    }


def reproduce(  # noqa: PLR0913  (a command: its options)
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME", help="experiments; default: all")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="a smaller version of each")] = False,
    json_out: JsonOut = None,
    traces: Traces = DEFAULT_TRACES,
    processes: Annotated[int, typer.Option(min=1, help="processes to use")] = 2,
    minutes: Annotated[
        float, typer.Option(min=0, help="start no point after so long; run again for the rest")
    ] = math.inf,
    only: Annotated[
        list[str] | None, typer.Option(help="points whose name is like this, as Coder/*; repeat for more")
    ] = None,
) -> None:
    """Reproduce the papers' tables; an interrupted run goes on where it was."""
    deadline_s = time.monotonic() + 60.0 * minutes
    wanted = names or experiment_names()
    if json_out is not None and len(wanted) > 1:
        raise ValueError("--json: names one file, so name one experiment")
    if only and json_out is None:
        raise ValueError("--only: name a file of its own with --json, so that no whole result is replaced by a part")
    for name in wanted:
        title = experiment(name).title
        out = json_out or Path("docs/results") / f"{name}{'-quick' if quick else ''}.json"
        with _progress() as bar:
            task = bar.add_task(name, total=None)

            def report(done: int, total: int, last: str, name: str = name, task: Any = task) -> None:
                bar.update(task, completed=done, total=total, description=f"{name} {last}")

            options = RunOptions(quick, traces, processes, lambda: time.monotonic() < deadline_s, tuple(only or ()))
            result = run_experiment(name, out, options, report)
        if result["missing"]:
            console.print(f"{name}: out of time, run again for the other {len(result['missing'])} points")
        table = Table("figure", "value", title=title)
        for key, value in result["headline"].items():
            table.add_row(key, f"{value:g}")
        console.print(table)
        if name == "slos-serve" and result["points"]:
            systems = ["vllm-2048", "vllm-whole", "sarathi", "edf-shed", "planner"]
            simulate_plots.capacities(result["points"], systems, out.with_suffix(".png"))
        elif name in ("polyserve", "polyserve-burst") and result["points"]:
            simulate_plots.goodput(result["points"], out.with_suffix(".png"))
        console.print(f"wrote {out}")
