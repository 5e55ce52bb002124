"""Runs experiments of ``simulation.experiments``: in parallel, taken up again where they were left, one JSON each."""

import contextlib
import hashlib
import importlib.metadata
import itertools
import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import serving.fidelity  # noqa: F401  (registers itself: it needs a real engine)
from simulation.experiments.registry import Context, Experiment, Point, Task, experiment, markdown_table

BEGIN, END = "<!-- results -->", "<!-- end of results -->"
Report = Callable[[int, int, str], None]  # points done, points in all, the one that was finished last


def run_experiment(
    name: str,
    *,
    quick: bool,
    traces: Path,
    out: Path,
    processes: int,
    report: Report,
    may_start: Callable[[], bool] = lambda: True,
) -> dict[str, Any] | None:
    """Run what is missing of an experiment and write ``out``; returns its content.

    Finished points are kept beside ``out`` until all are there, and then in it. They count for the same parameters,
    version and behaviour (``Experiment.behaviour``), so a later run repeats only what has changed. No task is started
    once ``may_start`` says no: then the result is None and the rest is for the next call.
    """
    chosen = experiment(name)
    config = chosen.config(quick)
    tasks = chosen.tasks(config)
    partial = out.with_suffix(".partial.jsonl")
    digests = {task.key: _digest(task, chosen, traces) for task in tasks}
    points = {point["key"]: point for point in _kept(out, partial) if digests.get(point["key"]) == point["digest"]}
    missing = [task for task in tasks if task.key not in points]
    report(len(tasks) - len(missing), len(tasks), "")
    out.parent.mkdir(parents=True, exist_ok=True)
    with partial.open("a") as kept:
        for task, point in _run_all(name, missing, traces, 1 if chosen.is_exclusive else processes, may_start):
            points[task.key] = {"key": task.key, "digest": digests[task.key], **point}
            kept.write(json.dumps(points[task.key]) + "\n")
            kept.flush()
            report(len(points), len(tasks), task.key)
    if len(points) < len(tasks):
        return None
    result = _result(chosen, config, [points[task.key] for task in tasks])
    out.write_text(json.dumps(result, indent=1) + "\n")
    partial.unlink()
    update_page(out.with_suffix(".md"), chosen, result)
    return result


def update_page(page: Path, chosen: Experiment, result: dict[str, Any]) -> None:
    """Put the tables into an experiment's page, between its two marks; the words around them are written by hand."""
    if not page.is_file():
        return
    before, mark, rest = page.read_text().partition(BEGIN)
    _old, end, after = rest.partition(END)
    if mark and end:
        figures = markdown_table(
            ("figure", "value"), [[f"`{key}`", value] for key, value in result["headline"].items()]
        )
        page.write_text(f"{before}{BEGIN}\n{figures}\n\n{chosen.tables(result['points'])}\n{END}{after}")


def _run_all(
    name: str, tasks: list[Task], traces: Path, processes: int, may_start: Callable[[], bool]
) -> Iterator[tuple[Task, Point]]:
    """Yield tasks and their points as they are finished, in order of ``tasks`` on one process."""
    if processes <= 1 or len(tasks) <= 1:
        for task in itertools.takewhile(lambda _task: may_start(), tasks):
            yield task, _run_one(name, task, traces)
        return
    waiting, running = iter(tasks), dict[Future[Point], Task]()
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        try:
            while True:
                for task in itertools.islice(waiting, processes - len(running) if may_start() else 0):
                    running[pool.submit(_run_one, name, task, traces)] = task
                if not running:
                    return
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    yield running.pop(future), future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _run_one(name: str, task: Task, traces: Path) -> Point:
    """One point, in whatever process."""
    return experiment(name).run(task.params, Context(traces, time.perf_counter))


def _digest(task: Task, chosen: Experiment, traces: Path) -> str:
    """What a point of the task depends on."""
    behaviour = chosen.behaviour(task.params, Context(traces, time.perf_counter))
    text = json.dumps([dict(task.params), _version(), behaviour], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _kept(out: Path, partial: Path) -> Iterator[Point]:
    """Points of earlier runs, finished and interrupted ones; a last line that was cut off is left out."""
    if out.is_file():
        yield from (point for point in json.loads(out.read_text())["points"] if "digest" in point)
    for line in partial.read_text().splitlines() if partial.is_file() else ():
        with contextlib.suppress(ValueError):
            yield json.loads(line)


def _version() -> str:
    try:
        return importlib.metadata.version("polyslo")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _result(chosen: Experiment, config: dict[str, Any], points: list[Point]) -> dict[str, Any]:
    return {
        "name": chosen.name,
        "version": _version(),
        "config": config,
        "seeds": config.get("seeds", []),
        "machine": {"cpu_count": os.cpu_count(), "platform": platform.platform(), "python": platform.python_version()},
        "headline": chosen.headline(points),
        "points": points,
    }
