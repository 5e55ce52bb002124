"""How many replicas a workload needs for a target, and what that costs per request."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from profiles.profile import Profile
from simulation.core.loop import Simulation
from simulation.core.metrics import Window, attained
from simulation.dispatchers.placement import KernelDispatcher
from simulation.studies.bound import fluid_bound_per_s
from simulation.studies.systems import PLANNER, engine_model

MOST_REPLICAS = 256


def run_fleet(jobs: np.ndarray, profile: Profile, replicas: int, seed: int = 0) -> Simulation:
    """A workload on a fleet of equal, shared replicas placed by the routing kernels."""
    engines = replace(PLANNER, replicas=replicas).engines(profile, seed)
    simulation = Simulation(jobs, engines, KernelDispatcher())
    simulation.run()
    return simulation


def judged_programs(jobs: np.ndarray) -> np.ndarray:
    """Positions of the first requests of the programs that a run is judged by; raises ``ValueError`` where there are
    none."""
    heads = Window.of(jobs).first_requests(jobs) if len(jobs) else np.zeros(0, dtype=np.int64)
    if not len(heads):
        raise ValueError("requests: none with an objective arrives between warm-up and cool-down, so nothing is judged")
    return heads


def worst_attainment(simulation: Simulation) -> tuple[float, float]:
    """Attainment of the tier that gets least, and attained programs per second over the whole run."""
    jobs, records = simulation.jobs, simulation.records
    heads = judged_programs(jobs)
    met = attained(jobs, records)["dslo"]
    tiers = jobs["tier"][heads]
    worst = min(float(met[heads[tiers == tier]].mean()) for tier in np.unique(tiers))
    times_s = jobs["arrival_s"][heads]
    return worst, float(met[heads].sum() / max(1e-9, times_s.max() - times_s.min()))


def least_replicas(jobs: np.ndarray, profile: Profile, target: float) -> int:
    """Replicas of which fewer cannot attain ``target``, whoever schedules: by the fluid bound of the requests that have
    an objective."""
    asked = jobs[~jobs["best_effort"]]
    _programs, first, own = np.unique(asked["program"], return_index=True, return_inverse=True)
    asked["program"] = first[own]  # a program is known by the place of its first request
    begun_s = asked["arrival_s"][np.isfinite(asked["arrival_s"])]
    if len(begun_s) < 2 or np.ptp(begun_s) <= 0.0:
        return 1
    bound_per_s = fluid_bound_per_s(asked, engine_model(profile), target)
    per_s = len(first) / float(np.ptp(begun_s))
    return max(1, int(per_s / bound_per_s)) if bound_per_s > 0.0 else 1


def replicas_needed(
    run: Callable[[int], Simulation],
    target: float,
    price: float = 1.0,
    report: Callable[[int, float], None] | None = None,
    least: int = 1,
) -> tuple[int, float, float]:
    """Fewest replicas whose worst tier attains ``target``: (replicas, attainment, cost per attained request).

    Doubles, then bisects; 0 replicas when ``MOST_REPLICAS`` are not enough.

    Args:
        run: plays the workload on so many replicas to its end.
        price: of one replica per second.
        report: is told every number that is tried, and its attainment.
        least: fewer are not enough, which is known without a run (``least_replicas``).
    """
    known: dict[int, tuple[float, float]] = {}

    def attains(replicas: int) -> bool:
        if replicas not in known:
            known[replicas] = worst_attainment(run(replicas))
            if report is not None:
                report(replicas, known[replicas][0])
        return known[replicas][0] >= target

    low, high = least - 1, min(least, MOST_REPLICAS)
    while not attains(high):
        if high >= MOST_REPLICAS:
            return 0, known[high][0], float("inf")
        low, high = high, min(2 * high, MOST_REPLICAS)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if attains(middle) else (middle, high)
    attainment, per_s = known[high]
    return high, attainment, price * high / per_s
