"""What ``polyslo plan`` plans for: all classes together, or each by itself; and what it cannot plan for. Pure."""

from collections.abc import Callable, Sequence

import numpy as np

from serving.cli.scenario import Scenario
from simulation.studies.sizing import judged_programs

Drawn = tuple[np.ndarray, np.ndarray]  # jobs, and the edges of their programs


def check_plan(asked: Scenario, where: str, apart: bool) -> None:
    """Raise ``ValueError`` for what a scenario says and a plan cannot take into account."""
    for number, section in enumerate(asked.classes):
        if section.num_replicas:
            raise ValueError(f"{where}: classes.{number}.num_replicas: plan says how many are needed; leave it out")
    if apart and (asked.workload.closed_loop or asked.workload.slos_serve):
        key = "closed_loop" if asked.workload.closed_loop else "slos_serve"
        raise ValueError(f"--apart: {where}: workload.{key}: its requests are of no classes that can be served apart")


def groups_of(asked: Scenario, apart: bool) -> list[tuple[str, int]]:
    """All classes together, then each one by itself."""
    own = [(section.name, number) for number, section in enumerate(asked.classes) if not section.best_effort]
    return [("all", -1), *(own if apart else [])]


def check_judged(
    asked: Scenario, where: str, groups: Sequence[tuple[str, int]], make_jobs: Callable[[float, int], Drawn]
) -> None:
    """Raise ``ValueError`` for a class of which some run would have nothing to judge, before any run."""
    for rate in asked.rates_per_s:
        for seed in asked.seeds:
            jobs, _edges = make_jobs(rate, seed)
            for who, number in groups:
                try:
                    judged_programs(only_class(jobs, number))
                except ValueError as error:
                    if number < 0:
                        raise ValueError(f"{where}: {error}") from None
                    told = f"no request of class {who!r} arrives between warm-up and cool-down at {rate:g} req/s"
                    told += f" with seed {seed}; raise its share, or requests"
                    raise ValueError(f"--apart: {where}: classes.{number}.share: {told}") from None


def only_class(jobs: np.ndarray, number: int) -> np.ndarray:
    """Jobs of one class alone, only for workloads of single requests; all of them for a number below 0."""
    if number < 0:
        return jobs
    own = jobs[jobs["tier"] == number].copy()
    own["program"] = np.arange(len(own))
    return own
