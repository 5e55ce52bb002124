"""A tenant that asks for ten times as much at a tenth of the TTFT, beside two that ask for what is theirs."""

from dataclasses import replace

import numpy as np
import pytest

from simulation.core.jobs import make_jobs
from simulation.core.loop import Simulation
from simulation.core.metrics import met_programs
from simulation.studies.systems import System
from tests.support.simulation_cases import a100, constant_time

GREEDY, MODEST = 1, (2, 3)
STEP_S, SECONDS = 0.02, 60.0


def asked() -> np.ndarray:
    """Two tenants with 1 request per second each, the third with 10; 16 places serve 8 such requests per second."""
    rng, parts = np.random.default_rng(5), []
    for tenant, rate, ttft_s in ((GREEDY, 10.0, 0.2), *((tenant, 1.0, 2.0) for tenant in MODEST)):
        jobs = make_jobs(int(rate * SECONDS))
        jobs["tenant"], jobs["ttft_s"], jobs["best_effort"] = tenant, ttft_s, False
        jobs["arrival_s"] = np.sort(rng.uniform(0.0, SECONDS, len(jobs)))
        parts.append(jobs)
    jobs = np.concatenate(parts)
    jobs["tpot_s"], jobs["prompt_tokens"], jobs["cap_tokens"] = 0.1, 100, 400
    jobs["output_tokens"] = jobs["predicted_tokens"] = 100
    jobs["program"] = np.arange(len(jobs))
    return jobs


def shares(system: System) -> dict[int, float]:
    """Share of every tenant's requests whose tokens were all on time."""
    jobs = asked()
    simulation = Simulation(jobs, system.engines(a100(), 1), system.dispatcher(a100(), jobs, 1))
    constant_time(simulation, STEP_S)
    simulation.run()
    met = met_programs(simulation.jobs, simulation.records)
    return {tenant: float(met[jobs["tenant"] == tenant].mean()) for tenant in (GREEDY, *MODEST)}


def batch_of_16(policy: str) -> System:
    return System(policy, policy, token_budget=2048, max_running=16)


@pytest.mark.parametrize("policy", ["edf", "vllm", "sjf"])
def test_without_fairness_the_greedy_tenant_starves_the_others(policy: str) -> None:
    assert max(shares(batch_of_16(policy))[tenant] for tenant in MODEST) < 0.5


@pytest.mark.parametrize("policy", ["vtc", "tempo", "calm"])
def test_fairness_keeps_the_others_served(policy: str) -> None:
    assert min(shares(batch_of_16(policy))[tenant] for tenant in MODEST) > 0.9


def test_it_is_the_fairness_that_does_it() -> None:
    """CALM serves the modest without it too: what the greedy one asks for is soon out of reach and worth nothing."""
    unfair = shares(replace(batch_of_16("tempo"), fairness=0.0))
    assert max(unfair[tenant] for tenant in MODEST) < 0.8


def test_a_tenant_of_twice_the_value_is_owed_twice_the_service() -> None:
    jobs = asked()
    jobs = jobs[jobs["tenant"] == GREEDY]
    jobs["tenant"] = 1 + np.arange(len(jobs)) % 2
    jobs["arrival_s"], jobs["program"] = 0.0, np.arange(len(jobs))
    jobs["value"] = np.where(jobs["tenant"] == 2, 2.0, 1.0)
    system = batch_of_16("vtc")
    simulation = Simulation(jobs, system.engines(a100(), 1), system.dispatcher(a100(), jobs, 1))
    constant_time(simulation, STEP_S)
    simulation.run(lambda running: False)
    early = simulation.records["last_s"] < 30.0
    counts = [int((early & (jobs["tenant"] == tenant)).sum()) for tenant in (1, 2)]
    assert counts[1] / counts[0] == pytest.approx(2.0, rel=0.2)
