"""Runs experiments of ``simulation.experiments``: in parallel, taken up again where they were left, one JSON each."""

import contextlib
import fnmatch
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
from typing import Any, NamedTuple

import serving.loadgen.fidelity  # noqa: F401  (registers itself: it needs a real engine)
from simulation.experiments.registry import Context, Experiment, Point, Task, experiment, markdown_table

BEGIN, END = "<!-- results -->", "<!-- end of results -->"
MOST_NAMED = 2  # of the points that are missing, on the page
Report = Callable[[int, int, str], None]  # points done, points in all, the one that was finished last


class RunOptions(NamedTuple):
    """How experiments are run; no task is started once ``may_start`` says no, and none whose key matches none of the
    patterns (``only``; of none: all)."""

    quick: bool
    traces: Path
    processes: int
    may_start: Callable[[], bool] = lambda: True
    only: tuple[str, ...] = ()


def run_experiment(name: str, out: Path, options: RunOptions, report: Report) -> dict[str, Any]:
    """Run what is missing of an experiment and write ``out``; returns its content.

    Finished points are kept beside ``out`` until all are there, and then in it, also those of an earlier result that a
    run has not come to yet. They count for the same parameters, version and behaviour (``Experiment.behaviour``), so a
    later run repeats only what has changed. Where ``options.may_start`` ends it, the result names what is ``missing``,
    which is for the next call.
    """
    chosen = experiment(name)
    config = chosen.config(options.quick)
    if options.only:
        config = {**config, "only": list(options.only)}
    tasks = _matching(name, chosen.tasks(config), options.only)
    partial = out.with_suffix(".partial.jsonl")
    earlier, begun = _of_result(out), _of_partial(partial)
    kept, points = earlier | begun, dict[str, Point]()
    report(0, len(tasks), "")
    out.parent.mkdir(parents=True, exist_ok=True)
    work = [(name, task, options.traces, kept.get(task.key)) for task in tasks]
    with partial.open("a") as lines:
        lines.write("\n")  # ends a line that was cut off
        lines.writelines(json.dumps(point) + "\n" for key, point in earlier.items() if key not in begun)
        lines.flush()
        for point in _run_all(work, 1 if chosen.is_exclusive else options.processes, options.may_start):
            key = point["key"]
            if point != kept.get(key):
                lines.write(json.dumps(point) + "\n")
                lines.flush()
            points[key] = point
            report(len(points), len(tasks), key)
    result = _result(chosen, config, tasks, points)
    out.write_text(json.dumps(result, indent=1) + "\n")
    if not result["missing"]:
        partial.unlink()
    update_page(out.with_suffix(".md"), chosen, result)
    return result


def _matching(name: str, tasks: list[Task], only: tuple[str, ...]) -> list[Task]:
    """Tasks whose key matches one of the patterns."""
    found = [task for task in tasks if not only or any(fnmatch.fnmatchcase(task.key, pattern) for pattern in only)]
    if not found:
        raise ValueError(f"--only: {name} has no point like {', '.join(only)}; one is called {tasks[0].key!r}")
    return found


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
        parts = [figures, *_what_is_missing(result), chosen.tables(result["points"]) if result["points"] else ""]
        page.write_text(before + BEGIN + "\n" + "\n\n".join(parts) + "\n" + END + after)


def _what_is_missing(result: dict[str, Any]) -> list[str]:
    """A sentence about points that have not been run, if there are any; the result file names all of them."""
    missing = result["missing"]
    names = ", ".join(f"`{key}`" for key in missing[:MOST_NAMED])
    if len(missing) > MOST_NAMED:
        names += f" and {len(missing) - MOST_NAMED} more"
    return [f"**Incomplete**: {len(missing)} points have not been run yet: {names}."] if missing else []


Work = tuple[str, Task, Path, Point | None]  # experiment, task, traces, the point that an earlier run has kept


def _run_all(work: list[Work], processes: int, may_start: Callable[[], bool]) -> Iterator[Point]:
    """Yield points as they are finished, in order of ``work`` on one process."""
    if processes <= 1 or len(work) <= 1:
        for piece in itertools.takewhile(lambda _piece: may_start(), work):
            yield _run_one(*piece)
        return
    waiting, running = iter(work), set[Future[Point]]()
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        try:
            while True:
                for piece in itertools.islice(waiting, processes - len(running) if may_start() else 0):
                    running.add(pool.submit(_run_one, *piece))
                if not running:
                    return
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    yield future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _run_one(name: str, task: Task, traces: Path, kept: Point | None) -> Point:
    """The point that was kept if it still holds, else a new one; in whatever process."""
    chosen, context = experiment(name), Context(traces, time.perf_counter)
    digest = _digest(task, chosen.behaviour(task.params, context))
    if kept is not None and kept["digest"] == digest:
        return kept
    return {"key": task.key, "digest": digest, **chosen.run(task.params, context)}


def _digest(task: Task, behaviour: str) -> str:
    """What a point of the task depends on."""
    text = json.dumps([dict(task.params), _version(), behaviour], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _of_result(out: Path) -> dict[str, Point]:
    """Points of an earlier result, by key; an empty file is a new one."""
    if not out.is_file() or not (text := out.read_text()).strip():
        return {}
    try:
        points = json.loads(text)["points"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"--json: {out} holds something else than an earlier result: take another file") from None
    return {point["key"]: point for point in points if "digest" in point}


def _of_partial(partial: Path) -> dict[str, Point]:
    """Points of interrupted runs, by key; a last line that was cut off is left out."""
    found = dict[str, Point]()
    for line in partial.read_text().splitlines() if partial.is_file() else ():
        with contextlib.suppress(ValueError):
            point = json.loads(line)
            found[point["key"]] = point
    return found


def _version() -> str:
    try:
        return importlib.metadata.version("polyslo")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _result(chosen: Experiment, config: dict[str, Any], tasks: list[Task], known: dict[str, Point]) -> dict[str, Any]:
    points = [known[task.key] for task in tasks if task.key in known]
    return {
        "name": chosen.name,
        "version": _version(),
        "config": config,
        "seeds": config.get("seeds", []),
        "machine": {"cpu_count": os.cpu_count(), "platform": platform.platform(), "python": platform.python_version()},
        "headline": chosen.headline(points) if points else {},
        "points": points,
        "missing": [task.key for task in tasks if task.key not in known],
    }
