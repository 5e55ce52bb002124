"""Capacity: the highest rate at which the share of attained programs stays at its target, by bisection.

Common random numbers: a seed fixes lengths and the shape of arrivals for every system and every rate, so systems differ
by what they decide and rates only by the scale of time.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from profiles.profile import Profile
from simulation.core.jobs import NEVER
from simulation.core.loop import Simulation
from simulation.core.metrics import Window, attained
from simulation.studies.systems import System

MakeJobs = Callable[[float, int], np.ndarray]  # (rate per second, seed) -> jobs
RATE_TOLERANCE = 0.02
FACTOR = 1.5  # of the search for a bracket
TARGET = 0.9


@dataclass(frozen=True)
class Attained:
    """Attainment of one run: over all judged programs, and of the tier that got least."""

    overall: float
    worst_tier: float


def attainment_of(simulation: Simulation, window: Window) -> Attained:
    """The two figures of a run."""
    heads = window.first_requests(simulation.jobs)
    met, tiers = attained(simulation.jobs, simulation.records)["dslo"][heads], simulation.jobs["tier"][heads]
    return Attained(float(met.mean()), min(float(met[tiers == t].mean()) for t in np.unique(tiers)))


def may_miss(judged: Any, target: float) -> Any:
    """How many of so many programs may miss (a number or an array of them) while the others reach the target."""
    return (1 - target) * judged + 1e-9  # a share that is the target exactly reaches it


class GiveUp:
    """Stops a run once so many programs of every kind have missed that no figure can reach the target."""

    def __init__(self, jobs: np.ndarray, window: Window, target: float, every: int = 64) -> None:
        heads = window.first_requests(jobs)
        self.is_judged = np.isin(jobs["program"], heads)
        self.program, self.allowed, self.every, self.calls = jobs["program"], may_miss(len(heads), target), every, 0

    def __call__(self, simulation: Simulation) -> bool:
        self.calls += 1
        if self.calls % self.every:
            return False
        missed = self.program[self._is_lost(simulation) & self.is_judged]
        return len(np.unique(missed)) > self.allowed

    def _is_lost(self, simulation: Simulation) -> np.ndarray:
        """Jobs that have missed for good: one that waits best effort may be promised again until its first token."""
        jobs, records = simulation.jobs, simulation.records
        waits = (records["emitted_tokens"] == 0) & (records["replica"] != NEVER)
        lost: np.ndarray = records["missed"] & ~(waits & (jobs["arrival_s"] + jobs["ttft_s"] > simulation.now_s))
        return lost


def run_system(
    system: System, profile: Profile, jobs: np.ndarray, seed: int, target: float | None = None
) -> Simulation:
    """Run jobs on one replica of a system; with ``target`` only as far as it takes to know that it is missed."""
    jobs = system.jobs(jobs)
    simulation = Simulation(jobs, system.engines(profile, seed), system.dispatcher(profile, jobs, seed))
    simulation.run(None if target is None else GiveUp(jobs, Window.of(jobs), target))
    return simulation


@dataclass
class Search:
    """Bisection over rates for one system and seed; runs are remembered, so both figures share them."""

    system: System
    profile: Profile
    make_jobs: MakeJobs
    seed: int
    target: float = TARGET
    tolerance: float = RATE_TOLERANCE
    known: dict[float, Attained] = field(default_factory=dict)

    def measure(self, rate_per_s: float) -> Attained:
        """Attainment at a rate."""
        if rate_per_s not in self.known:
            jobs = self.make_jobs(rate_per_s, self.seed)
            simulation = run_system(self.system, self.profile, jobs, self.seed, self.target)
            self.known[rate_per_s] = attainment_of(simulation, Window.of(jobs))
        return self.known[rate_per_s]

    def capacity(self, figure: str, start_per_s: float) -> float:
        """Highest rate, to ``tolerance``, at which ``figure`` of ``Attained`` reaches the target; 0: at none."""

        def holds(rate_per_s: float) -> bool:
            return bool(getattr(self.measure(rate_per_s), figure) >= self.target)

        low, high = 0.0, start_per_s
        while holds(high):
            low, high = high, high * FACTOR
        while low == 0.0 and high > start_per_s / 200:
            low, high = (high / FACTOR, high) if holds(high / FACTOR) else (0.0, high / FACTOR)
        while low > 0.0 and high - low > self.tolerance * low:
            middle = math.sqrt(low * high)
            low, high = (middle, high) if holds(middle) else (low, middle)
        return low


def median_and_spread(values: list[float]) -> dict[str, float]:
    """Median, least and greatest over seeds."""
    return {"median": float(np.median(values)), "low": min(values), "high": max(values)}
