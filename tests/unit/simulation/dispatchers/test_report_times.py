"""Reports in virtual time: as often as live ones while there is something to do, and far fewer of an idle fleet."""

import math

import numpy as np
import pytest

from controller.options import FleetOptions
from controller.pacing import ReportPacer
from simulation.core.loop import Simulation
from simulation.dispatchers import report_times
from simulation.dispatchers.live_fleet import ControllerDispatcher, tiers_of
from simulation.dispatchers.report_times import IDLE_S, RESTS_AFTER_S, ReportTimes
from simulation.studies.systems import FleetOf
from tests.support.simulation_cases import a100, random_jobs


class Counting(ControllerDispatcher):
    """Counts its reports."""

    told = 0

    def _report(self, simulation: Simulation) -> None:
        self.told += 1
        super()._report(simulation)


def played(jobs: np.ndarray) -> tuple[Simulation, int]:
    """A run of a fleet of two, and how often its replicas reported."""
    dispatcher = Counting(a100(), tiers_of(jobs), FleetOptions())
    simulation = Simulation(jobs, FleetOf("fleet", admits=True, replicas=2).engines(a100()), dispatcher)
    simulation.run()
    return simulation, dispatcher.told


def test_a_fleet_that_waits_long_for_each_request_reports_seldom() -> None:
    jobs = random_jobs(5, 0.01, 3)
    simulation, told = played(jobs)
    assert simulation.records["ended"].all()
    assert told < 0.25 * float(jobs["arrival_s"].max()) / ReportPacer().pause_s(2)


def test_a_fleet_that_waits_for_seconds_reports_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = random_jobs(30, 1.0, 5)
    simulation, told = played(jobs.copy())
    monkeypatch.setattr(report_times, "IDLE_S", 0.0)
    without_rest, as_ever = played(jobs.copy())
    assert told == as_ever
    assert simulation.records.tolist() == without_rest.records.tolist()


def test_the_pace_goes_on_as_if_there_had_been_no_rest() -> None:
    times = ReportTimes()
    for now_s in (2.0, 2.0 + RESTS_AFTER_S - 0.25):
        times.reported(now_s, 0.25, is_idle=True)
        assert times.next_s == now_s + 0.25
    times.reported(12.0, 0.25, is_idle=True)
    assert times.next_s == 12.0 + IDLE_S
    times.wake(12.3)
    assert times.next_s == 12.5
    times.wake(12.4)
    assert times.next_s == 12.5
    times.reported(12.5, 0.25, is_idle=True)
    assert times.next_s == 12.75, "it begins to rest anew"
    times.reported(12.75, math.inf, is_idle=True)
    times.wake(13.0)
    assert times.next_s == math.inf
