"""CALM under overload on engines that let many run at once."""

import numpy as np
import pytest

from simulation.core.jobs import make_jobs
from simulation.core.loop import Simulation
from simulation.core.metrics import met_programs
from simulation.studies.systems import System
from tests.support.simulation_cases import a100


def overload() -> np.ndarray:
    """Ten seconds of three times as many requests as can end by their deadlines."""
    jobs = make_jobs(1500)
    jobs["best_effort"], jobs["prompt_tokens"], jobs["cap_tokens"], jobs["e2e_s"] = False, 100, 400, 4.0
    jobs["arrival_s"] = np.arange(1500) / 150.0
    jobs["output_tokens"] = jobs["predicted_tokens"] = np.random.default_rng(1).integers(100, 300, 1500)
    return jobs


def met(most: int, adapts: bool) -> float:
    """Share of the requests that end in time."""
    system, jobs = System("calm", "calm", token_budget=2048, max_running=most, finds_size=adapts), overload()
    simulation = Simulation(jobs, system.engines(a100(), 1), system.dispatcher(a100(), jobs, 1))
    simulation.run()
    return float(met_programs(simulation.jobs, simulation.records).mean())


def test_a_size_that_is_found_serves_what_the_best_fixed_one_does() -> None:
    fixed = [met(most, adapts=False) for most in (32, 64, 128, 256)]
    found = met(256, adapts=True)
    assert found == pytest.approx(max(fixed), rel=0.1)
    assert found > 0.1 + fixed[-1]
