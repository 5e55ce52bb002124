import functools
from dataclasses import replace

import numpy as np
import pytest

from controller.mirror.lengths import TierLengths
from controller.mirror.replica_model import REPORTED_LIMITS
from controller.options import FleetOptions
from planning.admission.plan import AdmissionOptions
from planning.batch.registry import POLICIES, policy_code
from protocol.programs import Program
from routing.scores import MOST_LOADED
from simulation.core.jobs import EDGE, make_jobs
from simulation.core.loop import Simulation
from simulation.core.metrics import attained
from simulation.core.prefix_cache import PrefixCache
from simulation.dispatchers.live_fleet import ControllerDispatcher, replica_name, tiers_of
from simulation.dispatchers.placement import EngineMirrors, KernelDispatcher
from simulation.dispatchers.planner import AdmissionDispatcher
from simulation.studies.fleet_systems import FleetSystem, run_through
from simulation.studies.sizing import least_replicas, replicas_needed, run_fleet
from simulation.studies.systems import PLANNER, DistServe, FleetOf
from simulation.workloads.split import split_jobs
from simulation.workloads.traces import Trace
from tests.support.length_cases import predicted
from tests.support.simulation_cases import STOCK, a100, jobs_at, random_jobs, run


def oracle_run(jobs: np.ndarray) -> Simulation:
    return run(jobs, replace(PLANNER, is_oracle=True, displace=False, reconsiders=False))


def test_a_promise_with_known_lengths_is_kept() -> None:
    jobs = random_jobs(500, 20.0, 6)
    simulation = oracle_run(jobs)
    promised = simulation.records["promised"] & ~jobs["best_effort"]
    assert 50 < promised.sum() < 450
    assert not simulation.records["missed"][promised].any()


def test_asking_again_serves_at_least_as_many() -> None:
    counts = [0, 0]
    for seed in range(6):
        for reconsiders in (False, True):
            records = run(random_jobs(300, 12.0, seed), replace(PLANNER, reconsiders=reconsiders)).records
            counts[reconsiders] += int((records["promised"] & ~records["missed"]).sum())
    assert counts[1] >= counts[0]


def test_rounds_of_a_program_that_missed_ask_for_nothing() -> None:
    jobs = jobs_at([0.0, np.inf], prompt=8000, output=2, ttft_s=0.01)
    jobs["program"], jobs["follower"], jobs["ttft_s"][1] = 0, [1, -1], 10.0
    simulation = run(jobs, PLANNER)
    assert not simulation.records["promised"].any()
    assert simulation.records["ended"].all()


def test_outlived_predictions_grow_by_half_as_the_live_estimator_has_them() -> None:
    jobs = jobs_at([0.0], output=180)
    jobs["predicted_tokens"] = 100
    system = replace(PLANNER, admits=False)
    simulation = Simulation(jobs, system.engines(a100()), system.dispatcher(a100(), jobs))
    seen: dict[int, int] = {}
    estimator = TierLengths(100.0)
    simulation.dispatcher.dispatch(simulation, np.array([0]))
    for k in range(1, 1000):
        simulation._advance(0.005 * k)
        for row in simulation.table(0):
            seen[int(row["emitted_tokens"])] = int(row["output_tokens"])
    assert {99, 100, 150} <= set(seen)
    assert seen == {emitted: predicted(estimator, "any", emitted, 4096) for emitted in seen}


def test_under_a_controller_outlived_lengths_grow_by_a_token_as_live_engines_have_them() -> None:
    """Whatever jobs were predicted: what the rows say is the controller's estimate."""
    jobs = jobs_at([0.0], output=180)
    jobs["predicted_tokens"] = 40
    system = FleetOf("fleet", admits=True)
    for told, expected in ((180, {180}), (150, {150, *range(151, 181)})):
        simulation = Simulation(jobs, system.engines(a100()), system.dispatcher(a100(), jobs))
        row = simulation.rows(np.array([0]))[0]
        row["output_tokens"] = told
        simulation.place(row, 0)
        seen = set()
        for k in range(1, 1000):
            simulation._advance(0.005 * k)
            seen |= set(simulation.table(0)["output_tokens"].tolist())
        assert seen == expected
        assert simulation.records["ended"].all()


def test_unknown_policies_are_named_with_the_known_ones() -> None:
    assert [policy_code(policy.name) for policy in POLICIES] == list(range(len(POLICIES)))
    with pytest.raises(ValueError, match="known: "):
        policy_code("fifo")


def test_distserve_hands_every_request_over_once() -> None:
    jobs = random_jobs(120, 6.0, 2)
    jobs["best_effort"] = False
    system = DistServe("distserve", "vllm", sides=(2, 1))
    simulation = run(jobs, system)
    assert simulation.records["ended"].all()
    decodes = simulation.jobs["prefilled"] > 0
    assert decodes.sum() == (jobs["output_tokens"] > 1).sum()
    assert (simulation.records["replica"][decodes] == 2).all()
    assert (simulation.records["replica"][~decodes] < 2).all()
    emitted = np.bincount(simulation.jobs["program"], simulation.jobs["output_tokens"] - decodes)
    heads = np.flatnonzero(~decodes)
    np.testing.assert_array_equal(emitted[heads], jobs["output_tokens"])
    # A decode replica starts from the prompt's KV: nothing is computed twice there.
    assert simulation.engines.state[2]["prefill_tokens"] == decodes.sum()


def test_due_times_survive_the_hand_over() -> None:
    jobs = jobs_at([5.0], prompt=500, output=10, ttft_s=0.5, tpot_s=0.05)
    simulation = run(jobs, DistServe("distserve", "vllm", sides=(1, 1)))
    prompt, decode = simulation.jobs
    assert decode["arrival_s"] > prompt["arrival_s"]
    assert decode["arrival_s"] + decode["ttft_s"] == pytest.approx(5.5)


def test_rounds_survive_the_split() -> None:
    jobs = jobs_at([0.0, np.inf], output=5)
    jobs["program"], jobs["follower"], jobs["output_tokens"][1] = 0, [1, -1], 1
    split = split_jobs(jobs)
    assert split["follower"].tolist() == [1, 2, -1]
    assert split["program"].tolist() == [0, 0, 0]


def test_a_deadline_of_the_last_token_counts_from_arrival_on_both_sides() -> None:
    jobs = jobs_at([2.0], prompt=4000, output=200, ttft_s=np.inf, tpot_s=np.inf)
    whole_s = float(run(jobs, DistServe("distserve", "vllm")).records["last_s"][1] - 2.0)
    for e2e_s, met in ((whole_s - 0.01, False), (whole_s + 0.01, True)):
        jobs["e2e_s"] = e2e_s
        general = run(jobs, DistServe("distserve", "vllm"))
        compiled = run_through(FleetSystem("apart", "vllm", "least_loaded", prefills=1, replicas=2).run(a100(), jobs))
        assert attained(general.jobs, general.records)["dslo"][0] == met
        assert general.rows(np.array([1]))["deadline_s"] == pytest.approx(2.0 + e2e_s)
        assert compiled.fleet.rows["deadline_s"] == pytest.approx(2.0 + e2e_s)
        assert (compiled.jobs["arrival_s"] + compiled.jobs["e2e_s"]) == pytest.approx(2.0 + e2e_s)


def fleet_run(replicas: int = 3, **options: object) -> Simulation:
    jobs = random_jobs(250, 40.0, 8)
    system = FleetOf("fleet", admits=True, replicas=replicas)
    chosen = FleetOptions(**options)  # type: ignore[arg-type]
    simulation = Simulation(jobs, system.engines(a100()), ControllerDispatcher(a100(), tiers_of(jobs), chosen))
    simulation.run()
    return simulation


def test_the_controllers_fleet_runs_in_virtual_time() -> None:
    simulation = fleet_run()
    assert simulation.records["ended"].all()
    assert isinstance(simulation.dispatcher, ControllerDispatcher)
    simulation.dispatcher.fleet.check_integrity()
    assert sorted(simulation.dispatcher.fleet.replicas) == [replica_name(r) for r in range(3)]
    assert set(simulation.records["replica"]) == {0, 1, 2}
    assert len({decision.request_id for decision in simulation.dispatcher.decisions}) == 250, "some are recalled"


@pytest.mark.parametrize(("beyond", "output"), [(-19, 20), (-18, 20), (1, 1)])
def test_under_a_controller_what_no_kv_cache_can_hold_is_a_miss(beyond: int, output: int) -> None:
    jobs = jobs_at([0.0, 0.1, 0.2], prompt=100)
    jobs["prompt_tokens"][1] = a100().kv_capacity_tokens // 16 * 16 + beyond
    jobs["output_tokens"][1] = output
    system = FleetOf("fleet", admits=True)
    simulation = Simulation(jobs, system.engines(a100()), system.dispatcher(a100(), jobs))
    simulation.run(lambda running: running.now_s > 600.0)
    is_held = beyond + output <= 1
    assert simulation.now_s < 600.0, "the run ends by itself"
    assert simulation.records["ended"].tolist() == [True, is_held, True]
    assert is_held or attained(jobs, simulation.records)["dslo"].tolist() == [True, False, True]


def test_what_waits_for_a_refused_job_never_arrives() -> None:
    jobs = jobs_at([0.0, np.inf, np.inf, np.inf, 0.0], prompt=100)
    jobs["program"][:4], jobs["follower"][:2], jobs["follower"][2] = 0, (1, 3), 3
    jobs["prompt_tokens"][0] = 1 + a100().kv_capacity_tokens
    system, edges = FleetOf("fleet", admits=True), np.array([(0, 2, 0.0), (4, 3, 0.0)], dtype=EDGE)
    simulation = Simulation(jobs, system.engines(a100()), system.dispatcher(a100(), jobs), edges=edges)
    simulation.run(lambda running: running.now_s > 600.0)
    assert simulation.now_s < 600.0, "the run ends by itself"
    assert (simulation.left, simulation.records["ended"].tolist()) == (0, [False] * 4 + [True])


def test_mirrors_know_the_limits_of_their_engines() -> None:
    """One that they do not hear of has a default, and forecasts follow another engine."""
    jobs, engines = random_jobs(20, 40.0, 8), FleetOf("fleet", admits=True, replicas=1).engines(a100())
    told = {"block_tokens": 8, "max_running": 100, "max_batch_tokens": 1000, "max_iteration_s": 0.15}
    for name, value in (told | {"best_effort_share": 0.1, "best_effort_stretch": 3.0, "aging_s": 7.0}).items():
        engines.limits[name] = value
    dispatcher = ControllerDispatcher(a100(), tiers_of(jobs), FleetOptions())
    Simulation(jobs, engines, dispatcher).run()
    mirror, known = dispatcher.fleet.replicas[replica_name(0)].limits, list(REPORTED_LIMITS)
    assert mirror[known].tolist() == engines.limits[0][known].tolist()


def test_a_program_keeps_its_age_and_promise_while_a_tool_runs_for_long() -> None:
    """The controller has taken it to have ended by then; the ingress tells."""
    jobs = jobs_at([0.0, np.inf], output=5)
    jobs["program"], jobs["follower"], jobs["think_s"] = 0, [1, -1], [300.0, 0.0]
    told = {job: Program("p", 400.0) for job in range(2)}
    dispatcher = ControllerDispatcher(a100(), tiers_of(jobs), FleetOptions(), programs=told)
    Simulation(jobs, PLANNER.engines(a100()), dispatcher).run()
    first, later = (decision.stage for decision in dispatcher.decisions)
    assert first
    assert later
    assert (first.left_s, first.is_promised, later.is_promised) == (400.0, True, True)
    assert later.left_s == pytest.approx(100.0, abs=5.0)


def test_more_hops_promise_more() -> None:
    """By the load gradient, whose first choice is the one with the least room."""
    runs = [fleet_run(routing="load_gradient", max_hops=hops, pending=False) for hops in (1, 3)]
    assert runs[1].records["promised"].sum() > runs[0].records["promised"].sum()


def test_tiers_are_those_of_the_jobs() -> None:
    jobs = random_jobs(50, 1.0, 1)
    assert [tier.name for tier in tiers_of(jobs).tiers] == ["tier 0", "tier 1"]


def test_placement_by_the_kernels_fills_replicas_one_after_the_other() -> None:
    jobs = random_jobs(400, 8.0, 9)
    system = replace(PLANNER, replicas=6)
    simulation = Simulation(jobs, system.engines(a100()), KernelDispatcher(MOST_LOADED))
    simulation.run()
    assert simulation.records["ended"].all()
    busy_s = simulation.engines.state["busy_s"]
    assert busy_s[0] > 2 * busy_s[-1]  # a load gradient
    promised = simulation.records["promised"]
    assert simulation.records["missed"][promised].mean() < 0.05


def test_fewest_replicas_for_a_target() -> None:
    jobs = random_jobs(400, 25.0, 3)
    jobs["best_effort"] = False
    replicas, attainment, cost = replicas_needed(functools.partial(run_fleet, jobs, a100()), 0.9)
    assert replicas > 1
    assert attainment >= 0.9
    assert cost > 0
    asked: dict[int, float] = {}
    replicas_needed(functools.partial(run_fleet, jobs, a100()), 0.9, report=asked.__setitem__)
    assert asked[replicas - 1] < 0.9 <= asked[replicas]
    bound = least_replicas(jobs, a100(), 0.9)
    assert 1 < bound <= replicas
    asked.clear()
    run = functools.partial(run_fleet, jobs, a100())
    assert replicas_needed(run, 0.9, report=asked.__setitem__, least=bound)[0] == replicas
    assert min(asked) == bound
    assert replicas_needed(run, 0.9, least=replicas + 2)[0] == replicas + 2, "as told"
    jobs["best_effort"] = True
    assert least_replicas(jobs, a100(), 0.9) == 1


def test_prefix_blocks_of_ended_requests_are_found_again() -> None:
    none, lengths = np.zeros(0, dtype=np.int64), np.full(2, 1100)
    blocks = np.array([0, 1, 2, 0, 1, 3])
    trace = Trace("t", none, lengths, lengths, none, none, blocks, np.array([0, 3]), np.array([3, 3]), 512)
    jobs = jobs_at([0.0, 10.0], prompt=1100, output=3)
    jobs["first_block"], jobs["blocks"] = [0, 3], 3
    simulation = Simulation(jobs, STOCK.engines(a100()), STOCK.dispatcher(a100(), jobs))
    simulation.prefixes = PrefixCache(trace.blocks, trace.block_tokens, jobs, 1)
    simulation.run()
    assert simulation.records["cached_tokens"].tolist() == [0, 1024]
    assert simulation.engines.state[0]["prefill_tokens"] == 1100 + 76
    simulation.prefixes.shrink(0, 600)
    assert simulation.prefixes.held_tokens(0) == 512


def test_routing_sees_what_the_controller_would_see() -> None:
    jobs = jobs_at([0.0, 0.0], prompt=700, output=50)
    jobs["best_effort"][1] = True
    simulation = Simulation(jobs, STOCK.engines(a100()), STOCK.dispatcher(a100(), jobs))
    for row in simulation.rows(np.arange(2)):
        simulation.place(row, 0)
    seen = EngineMirrors().at(simulation).replicas[0]
    assert (seen["count"], seen["best_effort"], seen["backlog_tokens"]) == (2, 1, 1398.0)


def test_best_effort_jobs_are_never_refused() -> None:
    jobs = make_jobs(3)
    simulation = Simulation(jobs, PLANNER.engines(a100()), AdmissionDispatcher(AdmissionOptions()))
    simulation.run()
    assert simulation.records["ended"].all()
    assert not simulation.records["missed"].any()
