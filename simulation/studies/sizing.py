"""How many replicas a workload needs for a target, and what that costs per request."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from profiles.profile import Profile
from simulation.core.jobs import NO_EDGES
from simulation.core.loop import Simulation
from simulation.core.metrics import Window, attained
from simulation.dispatchers.placement import KernelDispatcher
from simulation.studies.systems import PLANNER

MOST_REPLICAS = 256


def run_fleet(
    jobs: np.ndarray, profile: Profile, replicas: int, seed: int = 0, edges: np.ndarray = NO_EDGES
) -> Simulation:
    """A workload on a fleet of equal, shared replicas placed by the routing kernels."""
    engines = replace(PLANNER, replicas=replicas).engines(profile, seed)
    simulation = Simulation(jobs, engines, KernelDispatcher(), edges=edges)
    simulation.run()
    return simulation


def worst_attainment(simulation: Simulation) -> tuple[float, float]:
    """Attainment of the tier that gets least, and attained programs per second over the whole run."""
    jobs, records = simulation.jobs, simulation.records
    heads = Window.of(jobs).first_requests(jobs)
    met = attained(jobs, records)["dslo"]
    tiers = jobs["tier"][heads]
    worst = min(float(met[heads[tiers == tier]].mean()) for tier in np.unique(tiers))
    times_s = jobs["arrival_s"][heads]
    return worst, float(met[heads].sum() / max(1e-9, times_s.max() - times_s.min()))


def replicas_needed(
    jobs: np.ndarray,
    profile: Profile,
    target: float,
    price: float = 1.0,
    report: Callable[[int, float], None] | None = None,
    edges: np.ndarray = NO_EDGES,
) -> tuple[int, float, float]:
    """Fewest replicas whose worst tier attains ``target``: (replicas, attainment, cost per attained request).

    Doubles, then bisects; 0 replicas when ``MOST_REPLICAS`` are not enough.
    """
    known: dict[int, tuple[float, float]] = {}

    def attains(replicas: int) -> bool:
        if replicas not in known:
            known[replicas] = worst_attainment(run_fleet(jobs, profile, replicas, edges=edges))
            if report is not None:
                report(replicas, known[replicas][0])
        return known[replicas][0] >= target

    high = 1
    while not attains(high):
        if high >= MOST_REPLICAS:
            return 0, known[high][0], float("inf")
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if attains(middle) else (middle, high)
    attainment, per_s = known[high]
    return high, attainment, price * high / per_s
