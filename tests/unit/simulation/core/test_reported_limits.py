"""The fleet plans by the limits that engines report."""

import numpy as np
import pytest

from replicas.step_planner import planner_limits
from simulation.core.loop import Simulation
from simulation.dispatchers.live_fleet import ControllerDispatcher
from simulation.studies.systems import FleetOf
from tests.support.simulation_cases import a100, jobs_at


def beside_a_backlog() -> np.ndarray:
    """Forty best-effort requests at once, then sixty with an objective, one after the other."""
    backlog = jobs_at([0.0] * 40, prompt=3000, output=150)
    backlog["best_effort"], backlog["ttft_s"], backlog["tpot_s"] = True, np.inf, np.inf
    asked = jobs_at(np.linspace(0.5, 8.0, 60).tolist(), prompt=2000, output=100, tpot_s=0.03)
    return np.concatenate([backlog, asked])


@pytest.mark.parametrize("share", [0.0, 0.2, 0.4])
def test_promises_are_kept_beside_the_share_of_best_effort(share: float) -> None:
    jobs, system = beside_a_backlog(), FleetOf("fleet", admits=True, best_effort_share=share)
    simulation = Simulation(jobs, system.engines(a100()), system.dispatcher(a100(), jobs))
    simulation.engines.limits["aging_s"] = 0.5
    simulation.run()
    promised = simulation.records["promised"] & ~jobs["best_effort"]
    assert promised.sum() > 10
    assert not simulation.records["missed"][promised].any()


def test_a_report_says_what_the_engine_keeps_to() -> None:
    jobs, system = beside_a_backlog(), FleetOf("fleet", admits=True, best_effort_share=0.3)
    simulation = Simulation(jobs, system.engines(a100()), dispatcher := system.dispatcher(a100(), jobs))
    assert isinstance(dispatcher, ControllerDispatcher)
    simulation.engines.limits["block_tokens"], simulation.engines.limits["max_iteration_s"] = 64, 0.1
    report = dispatcher.report(simulation, 0)
    assert (report.block_tokens, report.max_iteration_s, report.best_effort_share) == (64, 0.1, 0.3)


@pytest.mark.parametrize(("policy", "share"), [("slo", 0.0), ("tempo", 0.1), ("sarathi", 0.0)])
def test_a_modelled_fleet_keeps_the_share_that_live_engines_keep(policy: str, share: float) -> None:
    modelled = FleetOf("fleet", policy, admits=True).engines(a100()).limits["best_effort_share"]
    assert modelled.tolist() == [share] == [planner_limits(policy, {}, kv_capacity_tokens=1)["best_effort_share"]]
