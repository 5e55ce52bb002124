"""Concord's appendix D: inputs on which EDF and SJF do arbitrarily badly, and CALM does not."""

from dataclasses import replace

import numpy as np
import pytest

from simulation.core.jobs import make_jobs
from simulation.core.loop import Simulation
from simulation.core.metrics import token_goodputs
from simulation.studies.systems import System
from tests.support.simulation_cases import a100, constant_time

STEP_S, LONG_TOKENS, SHORT_TOKENS = 0.01, 200, 10
SPARE_S = 0.45  # of the long request: less than one of CALM's frames, several short requests
BOUND = 8.56  # theorem 4.1


def adversary(worth: float) -> np.ndarray:
    """One long request that is worth ``worth`` per token, and short ones without slack that come whenever the engine
    would be free (theorems D.1 and D.2). The first one runs when the long one comes."""
    count, own_s = LONG_TOKENS // SHORT_TOKENS, SHORT_TOKENS * STEP_S
    jobs = make_jobs(1 + count)
    jobs["best_effort"], jobs["prompt_tokens"], jobs["cap_tokens"] = False, 1, 400
    jobs["output_tokens"] = [LONG_TOKENS, *[SHORT_TOKENS] * count]
    jobs["predicted_tokens"] = jobs["output_tokens"]
    number = np.arange(count)
    jobs["arrival_s"] = [1.0, *(1.0 + number * own_s - STEP_S / 2 - (number > 0) * STEP_S / 2)]
    jobs["e2e_s"] = [LONG_TOKENS * STEP_S + SPARE_S, *[own_s + 0.7 * STEP_S] * count]
    jobs["value"] = [worth, *[1.0] * count]
    return jobs


def goodput(policy: str, worth: float) -> float:
    """Token goodput of one request at a time under the policy."""
    system = replace(System(policy, policy, token_budget=512, max_running=1), group_cutoff=1.0)
    jobs = adversary(worth)
    simulation = Simulation(jobs, system.engines(a100(), 1), system.dispatcher(a100(), jobs, 1))
    constant_time(simulation, STEP_S)
    simulation.run()
    return float(token_goodputs(simulation.jobs, simulation.records).sum())


def optimum(worth: float) -> float:
    """At least what the best schedule gets: the long request alone, or all short ones."""
    return max(worth * (LONG_TOKENS + 1), (LONG_TOKENS // SHORT_TOKENS) * (SHORT_TOKENS + 1.0))


@pytest.mark.parametrize("policy", ["edf", "sjf"])
def test_their_ratio_grows_without_bound(policy: str) -> None:
    ratios = [optimum(worth) / goodput(policy, worth) for worth in (10.0, 100.0, 1000.0)]
    assert ratios[0] > 8.0
    assert ratios[1] / ratios[0] == pytest.approx(10.0, rel=0.01)
    assert ratios[2] / ratios[1] == pytest.approx(10.0, rel=0.01)


@pytest.mark.parametrize("worth", [0.01, 0.1, 0.5, 1.0, 2.0, 10.0, 100.0, 1000.0])
def test_calm_stays_within_its_bound(worth: float) -> None:
    assert optimum(worth) / goodput("calm", worth) <= BOUND
