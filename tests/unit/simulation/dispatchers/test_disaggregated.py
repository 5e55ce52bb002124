"""The live controller's disaggregated fleet over modelled engines."""

import numpy as np
import pytest

from controller.disaggregation.phases import Phase, PhaseOptions
from controller.options import FleetOptions
from controller.scaling.allocation import AllocationOptions
from controller.scaling.signals import ScalingOptions
from simulation.core.jobs import NEVER
from simulation.core.loop import Simulation
from simulation.dispatchers.autoscaled import LiveSizer
from simulation.dispatchers.disaggregated import AutoscaledPhasesDispatcher, DisaggregatedDispatcher
from simulation.dispatchers.live_fleet import replica_name, tiers_of
from simulation.studies.systems import FleetOf
from simulation.workloads.settings import join
from simulation.workloads.split import split_jobs_over_link
from tests.support.simulation_cases import a100, jobs_at, random_jobs


def simulate(
    jobs: np.ndarray, replicas: int, phases: PhaseOptions, kv_tokens: int = 0
) -> tuple[Simulation, DisaggregatedDispatcher]:
    """Whole requests, cut in two and run to their end; on replicas with so little KV cache, if it is told."""
    dispatcher = DisaggregatedDispatcher(a100(), tiers_of(jobs), FleetOptions(phases=phases), report_s=0.15)
    engines = FleetOf("apart", admits=True, replicas=replicas).engines(a100())
    if kv_tokens:
        engines.limits["kv_capacity_tokens"] = kv_tokens
    simulation = Simulation(split_jobs_over_link(jobs), engines, dispatcher)
    simulation.run()
    return simulation, dispatcher


def halves(simulation: Simulation) -> tuple[np.ndarray, np.ndarray]:
    """Positions of prompts, and of the decodes that follow them."""
    prompts = np.flatnonzero(simulation.jobs["follower"] != NEVER)
    return prompts, simulation.jobs["follower"][prompts]


def test_each_half_runs_on_its_own_side_and_the_kv_cache_takes_its_time() -> None:
    pairs = np.arange(0.0, 6.0, 0.3)
    jobs = jobs_at(np.sort(np.concatenate([pairs, pairs + 0.02])).tolist(), prompt=2000, output=50)
    simulation, dispatcher = simulate(jobs, 4, PhaseOptions(prefill=2, adapt=False))
    prompts, decodes = halves(simulation)
    records = simulation.records
    assert records["ended"].all()
    assert set(records["replica"][prompts]) == {0, 1}
    assert set(records["replica"][decodes]) <= {2, 3}
    assert dispatcher.moved == len(jobs)
    transfer_s = simulation.jobs["arrival_s"][decodes] - records["last_s"][prompts]
    assert transfer_s == pytest.approx(2000 * 131072 / 50e9)
    assert (records["emitted_tokens"][decodes] == 50).all()
    assert not records["missed"].any()


def test_what_does_not_fit_apart_is_served_whole_and_nothing_is_lost() -> None:
    jobs = random_jobs(250, 25.0, 3)
    simulation, dispatcher = simulate(jobs, 3, PhaseOptions(prefill=1, adapt=False), kv_tokens=12_000)
    prompts, decodes = halves(simulation)
    records = simulation.records
    assert records["ended"].all()
    stayed = records["replica"][prompts] == records["replica"][decodes]
    assert 0 < stayed.sum() < len(prompts)
    assert dispatcher.moved == (~stayed).sum()
    assert (records["emitted_tokens"][decodes] == simulation.jobs["output_tokens"][decodes]).all()
    dispatcher.fleet.check_integrity()


def test_the_fleet_hears_of_every_request_once() -> None:
    jobs = random_jobs(120, 10.0, 4)
    _, dispatcher = simulate(jobs, 3, PhaseOptions(prefill=1, adapt=False))
    counted = sum(count.requests for count in dispatcher.fleet.tracker.total.values())
    assert counted == len(jobs)
    assert not dispatcher.fleet.unplaced.waiting
    known = [uid for replica in dispatcher.fleet.replicas.values() for uid in replica.table["id"].tolist()]
    assert known == []


def test_a_side_that_is_short_is_given_replicas() -> None:
    """Long prompts with short outputs on a fleet that has one replica for prompts."""
    jobs = jobs_at(np.arange(0.0, 90.0, 0.11).tolist(), prompt=3000, output=10, ttft_s=2.0)
    options = PhaseOptions(prefill=1, window_s=4.0, cooldown_s=5.0)
    simulation, dispatcher = simulate(jobs, 5, options)
    assert len(dispatcher.phases.on(Phase.PREFILL)) > 1
    assert dispatcher.phases.of(replica_name(4)) == Phase.DECODE
    moves = [change for change in dispatcher.fleet.allocation.history if change.after == Phase.PREFILL]
    assert moves
    fixed, _ = simulate(jobs, 5, PhaseOptions(prefill=1, adapt=False))
    assert simulation.records["missed"].sum() < fixed.records["missed"].sum()


def test_the_size_of_both_phases_follows_the_load_and_nobody_is_lost() -> None:
    """Long prompts with short outputs, then a little of everything: the fleet grows, and prefill gives back."""
    busy = jobs_at(np.arange(0.0, 60.0, 0.12).tolist(), prompt=3000, output=10, ttft_s=2.0)
    quiet = jobs_at(np.arange(60.0, 200.0, 2.0).tolist(), prompt=500, output=50)
    jobs = join([busy, quiet])
    scaling = ScalingOptions(
        min_replicas=2, max_replicas=5, phases=("prefill", "decode"), downscale_delay_s=30.0, downscale_cooldown_s=5.0
    )
    options = FleetOptions(phases=PhaseOptions(prefill=1), allocation=AllocationOptions(scaling=scaling))
    told = dict(sizer=LiveSizer(), begin=2, cold_start_s=5.0, report_s=0.15)
    dispatcher = AutoscaledPhasesDispatcher(a100(), tiers_of(jobs), options, **told)  # type: ignore[arg-type]
    simulation = Simulation(split_jobs_over_link(jobs), FleetOf("apart", replicas=8).engines(a100()), dispatcher)
    simulation.run()
    records = simulation.records
    assert records["ended"].all()
    assert (records["emitted_tokens"] == np.maximum(simulation.jobs["output_tokens"], 1)).all()
    dispatcher.fleet.check_integrity()
    assert dispatcher.replica_seconds(30.0, 60.0) > 3.0 * 30.0
    late = simulation.jobs["arrival_s"] > 20.0
    assert records["missed"][late].mean() < 0.05, "draining replicas keep what they promised"
    ended = [life for life in dispatcher.lives if life.ended_s < np.inf]
    assert ended
    assert min(len(dispatcher.phases.on(phase)) for phase in Phase) >= 1, "never the last of a phase"
