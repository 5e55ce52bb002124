"""Promises of a system that admits: how many it makes and keeps."""

import numpy as np

from profiles.profile import Profile
from simulation.core.metrics import Window, attained
from simulation.studies.capacity import MakeJobs, run_system
from simulation.studies.systems import System

OVERLOAD = 1.5  # of the capacity
Rates = list[tuple[int, float]]  # seeds and the capacities found with them


def tally(jobs: np.ndarray, records: np.ndarray, window: Window) -> tuple[int, int, int]:
    """Of the judged programs: how many there are, how many were promised their objective, how many of those got it."""
    heads = window.first_requests(jobs)
    unpromised = np.bincount(jobs["program"], weights=~records["promised"] & ~jobs["best_effort"], minlength=len(jobs))
    is_promised = unpromised[heads] == 0
    kept = attained(jobs, records)["dslo"][heads] & is_promised
    return len(heads), int(is_promised.sum()), int(kept.sum())


def count_promises(system: System, profile: Profile, jobs: np.ndarray, seed: int) -> tuple[int, int, int]:
    """``tally`` of one run."""
    simulation = run_system(system, profile, jobs, seed)
    return tally(simulation.jobs, simulation.records, Window.of(simulation.jobs))


def promises_at(system: System, profile: Profile, make: MakeJobs, rates: Rates) -> dict[str, list[int]]:
    """``count_promises`` summed over seeds, at the capacity of each seed and at ``OVERLOAD`` times it."""
    found = {}
    for name, factor in (("at_capacity", 1.0), ("overload", OVERLOAD)):
        counts = [
            count_promises(system, profile, make(factor * rate, seed), seed) for seed, rate in rates if rate > 0.0
        ]
        found[name] = [sum(count) for count in zip(*counts, strict=True)] if counts else [0, 0, 0]
    return found
