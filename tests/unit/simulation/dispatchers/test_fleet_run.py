"""Whole-fleet runs in one compiled loop: the same events as the general loop, hand-overs, waiting, promises."""

from dataclasses import replace

import numpy as np
import pytest

from profiles.store import load_profile
from simulation.core.engine import submit
from simulation.core.loop import Simulation
from simulation.dispatchers.fleet_run import Run
from simulation.dispatchers.placement import BalancerDispatcher
from simulation.studies.fleet_systems import FleetSystem, Goodput, attainment, planned_fleet, run_through
from simulation.workloads.lengths import Empirical
from simulation.workloads.polyserve import TieredLoad

PROFILE = load_profile("h200_sxm__llama-3.1-8b")
LOAD = TieredLoad(Empirical([200, 800, 4000, 9000]), Empirical([20, 60, 200]))
BALANCED = FleetSystem("balanced", "slo", "least_loaded", replicas=4)


def jobs_at(rate_per_s: float, count: int = 400, seed: int = 1) -> np.ndarray:
    return LOAD.jobs(PROFILE, rate_per_s, count, seed)


def done(system: FleetSystem, jobs: np.ndarray) -> Run:
    return run_through(system.run(PROFILE, jobs))


@pytest.mark.parametrize("routing", ["least_loaded", "round_robin"])
def test_same_records_as_the_general_loop(routing: str) -> None:
    jobs = jobs_at(60.0)
    run = replace(BALANCED, routing=routing).run(PROFILE, jobs)
    general = Simulation(
        jobs, replace(BALANCED, routing=routing).run(PROFILE, jobs).engines, BalancerDispatcher(routing)
    )
    general.run()
    assert (run_through(run).records == general.records).all()


def test_tables_grow_where_they_are_full() -> None:
    jobs = jobs_at(3000.0, 2500)
    run = done(replace(BALANCED, replicas=2), jobs)
    assert run.engines.tables.shape[1] > 1024
    assert run.records["ended"].all()


def test_however_many_come_at_one_instant_tables_hold_them() -> None:
    jobs = jobs_at(3000.0, 1800)
    jobs["arrival_s"], jobs["ttft_s"], jobs["prompt_tokens"] = 0.0, 60.0, 100
    run = done(replace(BALANCED, replicas=1), jobs)
    assert run.records["ended"].all()
    assert (run.records["replica"] == 0).all()
    run.engines.state["count"] = run.engines.tables.shape[1]
    with pytest.raises(IndexError, match="full"):
        submit(run.engines, 0, run.fleet.rows[0], 0.0)


@pytest.mark.parametrize("routing", ["promise", "promise_added"])
def test_promises_with_known_lengths_are_kept(routing: str) -> None:
    jobs = jobs_at(120.0)
    jobs["predicted_tokens"] = jobs["output_tokens"]
    run = done(replace(planned_fleet(4), routing=routing), jobs)
    promised = run.records["promised"]
    assert 40 < promised.sum() < 390
    assert not run.records["missed"][promised].any()


def test_what_waits_at_the_dispatcher_is_served_more_often() -> None:
    jobs = jobs_at(110.0)
    patient = planned_fleet(4)
    asked_once = replace(patient, retry_s=np.inf)
    assert attainment(done(patient, jobs)).overall > attainment(done(asked_once, jobs)).overall


def test_the_two_halves_of_a_request_run_on_their_own_sides() -> None:
    jobs = jobs_at(30.0)
    run = done(planned_fleet(4, 2), jobs)
    is_decode = run.jobs["prefilled"] > 0
    assert (run.records["replica"][~is_decode] < 2).all()
    assert (run.records["replica"][is_decode] >= 2).all()
    decodes = np.flatnonzero(is_decode)
    ready_s = run.records["last_s"][decodes - 1] + run.jobs["think_s"][decodes - 1]
    assert run.jobs["arrival_s"][decodes] == pytest.approx(ready_s)
    assert run.records["ended"].all()
    due_s = run.jobs["arrival_s"] + run.jobs["ttft_s"]
    assert due_s[decodes] == pytest.approx(due_s[decodes - 1])


def test_a_tier_s_requests_stay_in_its_silo() -> None:
    run = done(replace(BALANCED, split=(1, 1, 1, 1)), jobs_at(20.0))
    assert (run.records["replica"] == run.jobs["tier"]).all()


def test_where_least_is_added_tight_requests_gather_and_counts_spread_them() -> None:
    jobs = jobs_at(30.0)
    shares = []
    for routing in ("promise", "promise_added"):
        run = done(replace(planned_fleet(4), routing=routing), jobs)
        shares.append(np.bincount(run.records["replica"][jobs["tier"] == 0], minlength=4).max())
    assert shares[0] < shares[1]


def test_the_gradient_leaves_replicas_empty_and_spreads_beyond_comfort() -> None:
    jobs = jobs_at(10.0)
    used = [
        len(np.unique(done(replace(BALANCED, routing="gradient", load_ceiling=load_ceiling), jobs).records["replica"]))
        for load_ceiling in (0.9, 0.0)
    ]
    assert used[0] < used[1] == 4


def test_goodput_is_the_highest_rate_of_the_grid_that_holds() -> None:
    goodput = Goodput(BALANCED, PROFILE, jobs_at, unit_per_s=60.0)
    found = goodput.search("worst_tier", 0)
    assert goodput.holds("worst_tier", found)
    assert not goodput.holds("worst_tier", found + 1)
    assert goodput.holds("overall", found), "the worst tier is never better than all"


def test_giving_up_early_does_not_change_the_verdict() -> None:
    jobs = jobs_at(400.0)
    whole = attainment(done(BALANCED, jobs)).worst_tier >= 0.9
    assert Goodput(BALANCED, PROFILE, lambda _rate: jobs, 1.0).holds("worst_tier", 0) == whole
