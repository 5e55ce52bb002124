"""What an experiment is: independent tasks that give points, and a headline made of all points."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from profiles.suggest import suggest

Point = dict[str, Any]  # plain JSON values
Clock = Callable[[], float]  # seconds; only for experiments that measure the simulator itself


@dataclass(frozen=True)
class Context:
    """What a task needs beside its parameters."""

    traces: Path
    clock: Clock


@dataclass(frozen=True)
class Task:
    """One point to be computed; ``key`` names it for good, so that a run can be taken up again."""

    key: str
    params: Mapping[str, Any]


@dataclass(frozen=True)
class Experiment:
    """How one experiment is cut into tasks and put together again."""

    name: str
    title: str
    config: Callable[[bool], dict[str, Any]]  # by quick or not
    tasks: Callable[[dict[str, Any]], list[Task]]  # of a config
    run: Callable[[Mapping[str, Any], Context], Point]
    headline: Callable[[Sequence[Point]], dict[str, float]]
    tables: Callable[[Sequence[Point]], str]  # markdown
    # How what a task runs decides now: a kept point holds as long as this and the task's parameters are the same.
    behaviour: Callable[[Mapping[str, Any], Context], str] = lambda params, context: ""
    is_exclusive: bool = False  # it measures the machine: one task at a time


_experiments: dict[str, Experiment] = {}


def register(experiment: Experiment) -> Experiment:
    """Make an experiment known by its name; a duplicate raises ``ValueError``."""
    if experiment.name in _experiments:
        raise ValueError(f"experiment {experiment.name!r} is registered twice")
    _experiments[experiment.name] = experiment
    return experiment


def experiment_names() -> list[str]:
    """All registered names, sorted."""
    import simulation.experiments.ablations
    import simulation.experiments.annealing
    import simulation.experiments.concord
    import simulation.experiments.dp_value
    import simulation.experiments.elastic
    import simulation.experiments.length_bounds
    import simulation.experiments.length_use
    import simulation.experiments.polyserve
    import simulation.experiments.polyserve_burst
    import simulation.experiments.polyserve_cost
    import simulation.experiments.programs
    import simulation.experiments.promises
    import simulation.experiments.routing
    import simulation.experiments.sides
    import simulation.experiments.slos_serve
    import simulation.experiments.speculation
    import simulation.experiments.tempo
    import simulation.experiments.what_if  # noqa: F401  (they register themselves)

    return sorted(_experiments)


def experiment(name: str) -> Experiment:
    """The experiment of that name; raises ``ValueError`` listing the known ones."""
    names = experiment_names()
    if name not in names:
        raise ValueError(f"experiment: unknown {name!r}; {suggest(name, list(names))}")
    return _experiments[name]


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table in markdown; floats with three significant digits."""

    def cell(value: object) -> str:
        return f"{value:.3g}" if isinstance(value, float) else str(value)

    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    lines += ["| " + " | ".join(map(cell, row)) + " |" for row in rows]
    return "\n".join(lines)
