"""Runs experiments of ``simulation.experiments``: in parallel, taken up again where they were left, one JSON each."""

import hashlib
import importlib.metadata
import json
import os
import platform
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import serving.fidelity  # noqa: F401  (registers itself: it needs a real engine)
from simulation.experiments.registry import Context, Experiment, Point, Task, experiment, markdown_table

BEGIN, END = "<!-- results -->", "<!-- end of results -->"
Report = Callable[[int, int, str], None]  # points done, points in all, the one that was finished last


def run_experiment(
    name: str, *, quick: bool, traces: Path, out: Path, processes: int, report: Report
) -> dict[str, Any]:
    """Run what is missing of an experiment and write ``out``; returns its content.

    Finished points are kept beside ``out`` until all are there, and count only for the same configuration and version.
    """
    chosen = experiment(name)
    config = chosen.config(quick)
    tasks = chosen.tasks(config)
    partial = out.with_suffix(".partial.jsonl")
    digest = _digest(config)
    points = _read_points(partial, digest)
    missing = [task for task in tasks if task.key not in points]
    report(len(tasks) - len(missing), len(tasks), "")
    out.parent.mkdir(parents=True, exist_ok=True)
    with partial.open("a") as kept:
        for task, point in _run_all(name, missing, traces, 1 if chosen.is_exclusive else processes):
            points[task.key] = point
            kept.write(json.dumps({"digest": digest, "key": task.key, "point": point}) + "\n")
            kept.flush()
            report(len(points), len(tasks), task.key)
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


def _run_all(name: str, tasks: list[Task], traces: Path, processes: int) -> Any:
    """Yield (task, point) as they are finished."""
    if processes <= 1 or len(tasks) <= 1:
        for task in tasks:
            yield task, _run_one(name, task, traces)
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        running: dict[Future[Point], Task] = {pool.submit(_run_one, name, task, traces): task for task in tasks}
        try:
            while running:
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    yield running.pop(future), future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _run_one(name: str, task: Task, traces: Path) -> Point:
    """One point, in whatever process."""
    return experiment(name).run(task.params, Context(traces, time.perf_counter))


def _digest(config: dict[str, Any]) -> str:
    text = json.dumps([config, _version()], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _read_points(path: Path, digest: str) -> dict[str, Point]:
    """Points of an earlier run of the same configuration; a last line that was cut off is left out."""
    points: dict[str, Point] = {}
    for line in path.read_text().splitlines() if path.is_file() else ():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if entry["digest"] == digest:
            points[entry["key"]] = entry["point"]
    return points


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
