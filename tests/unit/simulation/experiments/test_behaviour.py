"""A digest of what a system decides: the same for the same decisions, another one for others."""

from dataclasses import replace

import numpy as np

from simulation.core.jobs import NEVER, make_jobs
from simulation.experiments.behaviour import behaviour, first_programs
from tests.support.simulation_cases import STOCK, a100, random_jobs


def small_load(per_s: float, seed: int) -> np.ndarray:
    return random_jobs(150, per_s, seed)


def test_a_digest_tells_other_decisions_and_not_other_names() -> None:
    digest = behaviour(STOCK, a100(), small_load)
    assert behaviour(replace(STOCK, name="renamed"), a100(), small_load) == digest
    assert behaviour(replace(STOCK, token_budget=512), a100(), small_load) != digest


def test_the_first_programs_come_with_all_their_calls() -> None:
    jobs = make_jobs(5)
    jobs["program"], jobs["follower"] = [0, 1, 0, 1, 4], [2, 3, NEVER, NEVER, NEVER]
    jobs["arrival_s"] = [5.0, 1.0, np.inf, np.inf, 9.0]
    kept = first_programs(jobs, 2)
    assert kept["arrival_s"].tolist() == [5.0, 1.0, np.inf, np.inf]
    assert (kept["program"].tolist(), kept["follower"].tolist()) == ([0, 1, 0, 1], [2, 3, NEVER, NEVER])
    (alone, call) = first_programs(jobs, 1)
    assert (alone["arrival_s"], alone["program"], alone["follower"]) == (1.0, 0, 1)
    assert (call["program"], call["follower"]) == (0, NEVER)
