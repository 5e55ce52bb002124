from dataclasses import replace

import numpy as np

from simulation.core.loop import Simulation
from simulation.dispatchers.placement import BalancerDispatcher
from tests.support.simulation_cases import STOCK, a100, jobs_at, random_jobs, run


def program(rounds: int, think_s: float) -> np.ndarray:
    jobs = jobs_at([1.0] + [np.inf] * (rounds - 1), output=5)
    jobs["program"], jobs["follower"] = 0, [*range(1, rounds), -1]
    jobs["think_s"] = think_s
    return jobs


def test_a_follower_arrives_when_its_predecessor_has_ended_and_thought() -> None:
    simulation = run(program(4, 0.25), STOCK)
    ends_s, arrivals_s = simulation.records["last_s"], simulation.jobs["arrival_s"]
    np.testing.assert_allclose(arrivals_s[1:], ends_s[:-1] + 0.25)
    assert simulation.records["ended"].all()


class Hears(BalancerDispatcher):
    """Notes when it hears of ends, and of arrivals in between."""

    hears_ends = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.told: list[tuple[float, int]] = []

    def on_ended(self, simulation: Simulation, which: np.ndarray) -> None:
        self.told += [(simulation.now_s, job) for job in which.tolist()]

    def dispatch(self, simulation: Simulation, which: np.ndarray) -> None:
        assert len(which), "an end is no reason to be asked"
        super().dispatch(simulation, which)
        ended = simulation.records["ended"] & (simulation.records["last_s"] <= simulation.now_s)
        assert ended.sum() == len(self.told), "all ends until now, and no later ones"


def test_dispatchers_hear_of_ends_when_they_come_to_pass() -> None:
    jobs, system = random_jobs(200, 15.0, 2), replace(STOCK, replicas=2)
    chain = jobs_at([1.0] + [np.inf] * 4, output=5)
    chain["program"], chain["follower"] = 200, [201, 202, 203, 204, -1]
    jobs = np.concatenate((jobs, chain))
    dispatcher = Hears()
    simulation = Simulation(jobs, system.engines(a100()), dispatcher)
    simulation.run()
    records = simulation.records
    assert dispatcher.told == sorted(zip(records["last_s"].tolist(), range(len(jobs)), strict=True))
    assert records.tobytes() == run(jobs, system).records.tobytes(), "hearing changes nothing"


def test_followers_come_in_time_order_among_other_arrivals() -> None:
    chain, others = program(3, 0.0), jobs_at(np.arange(1.0, 3.0, 0.01).tolist(), output=5)
    others["program"] += 3
    simulation = run(np.concatenate((chain, others)), STOCK)
    assert (simulation.records["first_s"] > simulation.jobs["arrival_s"]).all()
    assert simulation.records["ended"].all()
    # Queued in order of arrival: the first token of whoever came first is never later.
    order = np.argsort(simulation.jobs["arrival_s"], kind="stable")
    assert (np.diff(simulation.records["first_s"][order]) >= 0).all()


def test_replicas_do_not_see_each_other() -> None:
    jobs = random_jobs(200, 15.0, 2)
    both = run(jobs, replace(STOCK, replicas=2))
    for replica in (0, 1):
        own = np.flatnonzero(both.records["replica"] == replica)
        part = jobs[own].copy()
        part["program"] = np.arange(len(part))
        alone = run(part, STOCK)
        np.testing.assert_array_equal(alone.records["last_s"], both.records["last_s"][own])


def test_tables_grow_under_overload() -> None:
    assert run(jobs_at([0.0] * 1500, prompt=20, output=2), STOCK).records["ended"].all()


def test_a_prompt_that_fits_nowhere_ends_the_run_unfinished() -> None:
    jobs = jobs_at([0.0], prompt=5000)
    simulation = Simulation(jobs, STOCK.engines(a100()), STOCK.dispatcher(a100(), jobs))
    simulation.engines.limits["kv_capacity_tokens"] = 1000
    simulation.run()
    assert not simulation.records["ended"][0]


def test_watch_stops_a_run() -> None:
    jobs = jobs_at(np.arange(50.0).tolist())
    simulation = Simulation(jobs, STOCK.engines(a100()), STOCK.dispatcher(a100(), jobs))
    simulation.run(lambda running: running.now_s >= 10.0)
    assert simulation.now_s == 10.0
    assert 0 < simulation.records["ended"].sum() <= 11
