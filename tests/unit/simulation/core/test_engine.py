"""The modelled engine against closed forms, and what it may never lose or invent."""

from dataclasses import replace

import numpy as np
import pytest

from planning.batch.kv import held_kv_tokens
from planning.forecast.lockstep import accepted_tokens
from profiles.kernels import attention_pairs, iteration_s
from simulation.core.engine import advance_engines, submit
from simulation.core.jobs import make_records
from simulation.core.loop import Simulation
from simulation.core.progress import accepted_drafts
from simulation.studies.systems import BASELINES, PLANNER, System
from tests.support.simulation_cases import STOCK, a100, constant_time, jobs_at, random_jobs, run


@pytest.mark.parametrize("system", [PLANNER, *BASELINES], ids=lambda system: system.name)
def test_one_request_alone_takes_what_the_profile_says(system: System) -> None:
    coef = a100().coefficients
    simulation = run(jobs_at([3.0], prompt=500, output=4, tpot_s=0.5), system)
    first_s = iteration_s(coef, 500.0, 0.0, attention_pairs(500, 0), 1.0, 0.0)
    rest_s = sum(iteration_s(coef, 1.0, 500.0 + step, 0.0, 1.0, 0.0) for step in (1, 2, 3))
    record = simulation.records[0]
    assert record["first_s"] == pytest.approx(3.0 + first_s, rel=1e-9)
    assert record["last_s"] == pytest.approx(3.0 + first_s + rest_s, rel=1e-9)
    assert record["ended"]
    assert record["emitted_tokens"] == 4


def constant(jobs: np.ndarray, seconds: float, system: System) -> Simulation:
    simulation = Simulation(jobs, system.engines(a100()), system.dispatcher(a100(), jobs))
    constant_time(simulation, seconds)
    simulation.run()
    return simulation


def test_arrivals_of_one_instant_share_a_batch_and_later_ones_wait_for_its_end() -> None:
    jobs = jobs_at([1.0, 1.0, 1.04, 1.1], prompt=10, output=1)
    first_s = constant(jobs, 0.1, STOCK).records["first_s"]
    # The last one arrives at the very end of an iteration: it is queued before the next batch forms.
    np.testing.assert_allclose(first_s, [1.1, 1.1, 1.2, 1.2])


def test_low_load_waits_like_m_d_1() -> None:
    rng = np.random.default_rng(5)
    load, service_s = 0.5, 0.01
    jobs = jobs_at(np.cumsum(rng.exponential(service_s / load, 20_000)).tolist(), prompt=10, output=1)
    simulation = constant(jobs, service_s, replace(STOCK, max_running=1))
    wait_s = simulation.records["first_s"] - simulation.jobs["arrival_s"] - service_s
    assert wait_s.mean() == pytest.approx(service_s * load / (2 * (1 - load)), rel=0.06)


def test_throughput_at_overload_is_a_full_batch_per_iteration() -> None:
    simulation = constant(jobs_at([0.0] * 64, prompt=10, output=100), 0.01, replace(STOCK, max_running=16))
    # Four waves of 16 requests; each takes 100 iterations, the prompt's included.
    assert simulation.engines.state[0]["iterations"] == 400
    assert simulation.records["last_s"].max() == pytest.approx(4.0)


@pytest.mark.parametrize("system", [PLANNER, *BASELINES], ids=lambda system: system.name)
def test_tokens_and_kv_are_conserved_at_every_step(system: System) -> None:
    jobs = random_jobs(60, 40.0, 1)
    engines = system.engines(a100())
    engines.limits["kv_capacity_tokens"] = 12_000
    records, ended = make_records(len(jobs)), np.zeros(2048, dtype=np.int64)
    simulation = Simulation(jobs, engines, system.dispatcher(a100(), jobs))
    for row in simulation.rows(np.arange(len(jobs))):
        submit(engines, 0, row, 0.0)
    emitted, gone = np.zeros(len(jobs), dtype=np.int64), 0
    while engines.state[0]["count"]:
        _reached_s, count = advance_engines(
            engines, jobs, records, np.nextafter(engines.state[0]["free_at_s"], np.inf), ended
        )
        gone += count
        table = engines.tables[0, : engines.state[0]["count"]]
        assert sum(held_kv_tokens(row, 16) for row in table) <= 12_000
        assert (table["computed_tokens"] < table["prompt_tokens"] + table["emitted_tokens"]).all()
        assert (records["emitted_tokens"] >= emitted).all()
        np.testing.assert_array_equal(table["emitted_tokens"], records["emitted_tokens"][table["id"] - 1])
        assert len(table) + gone == len(jobs)
        emitted = records["emitted_tokens"].copy()
    np.testing.assert_array_equal(emitted, jobs["output_tokens"])
    assert engines.state[0]["decode_tokens"] == jobs["output_tokens"].sum()
    recomputed = engines.state[0]["prefill_tokens"] - jobs["prompt_tokens"].sum()
    assert recomputed >= 0
    assert (recomputed > 0) == (engines.state[0]["preemptions"] > 0)


def test_a_recompute_of_prompt_and_tokens_emits_one() -> None:
    jobs = jobs_at([0.0, 0.0], prompt=450, output=60, ttft_s=100.0)
    simulation = Simulation(jobs, STOCK.engines(a100()), STOCK.dispatcher(a100(), jobs))
    simulation.engines.limits["kv_capacity_tokens"] = 960
    simulation.run()
    state = simulation.engines.state[0]
    assert state["preemptions"] == 1
    victim = int(simulation.records["preemptions"].argmax())
    # The recompute covers the prompt and what was emitted by then, and its end counts as a decode step.
    assert state["prefill_tokens"] - 900 > 450
    assert simulation.records[victim]["emitted_tokens"] == 60
    assert state["decode_tokens"] == 120


def test_a_run_is_repeatable_bit_for_bit() -> None:
    system = replace(PLANNER, drafts=3, adapts_drafts=True, acceptance=0.6, draft_s=0.001)
    first, second, other = (run(random_jobs(150, 10.0, 3), system, seed=seed) for seed in (1, 1, 2))
    assert first.records.tobytes() == second.records.tobytes()
    assert first.engines.state.tobytes() == second.engines.state.tobytes()
    assert first.records.tobytes() != other.records.tobytes()


def test_drafts_are_accepted_at_their_rate() -> None:
    row = np.zeros(1, dtype=run(jobs_at([0.0])).engines.tables.dtype)[0]
    row["spec_tokens"], accepted = 4, []
    for request in range(20_000):
        row["id"] = request
        accepted.append(1 + accepted_drafts(row, 0.7, 9))
    assert np.mean(accepted) == pytest.approx(accepted_tokens(4, 0.7), rel=0.01)


def test_speculation_saves_iterations_and_emits_the_same_tokens() -> None:
    jobs = jobs_at([0.0] * 4, prompt=100, output=200)
    plain = run(jobs, STOCK)
    fast = run(jobs, replace(STOCK, drafts=3, acceptance=0.8, draft_s=0.0005))
    assert fast.engines.state[0]["iterations"] < 0.5 * plain.engines.state[0]["iterations"]
    np.testing.assert_array_equal(fast.records["emitted_tokens"], plain.records["emitted_tokens"])


def test_first_tokens_do_not_wait_for_filler() -> None:
    jobs = jobs_at([0.0, *([0.05] * 4)], prompt=800, output=1, ttft_s=0.3)
    jobs["prompt_tokens"][0], jobs["best_effort"][0] = 20_000, True
    records = run(jobs).records
    assert not records["missed"][1:].any()
    assert records["ended"].all()


def test_best_effort_work_costs_no_objective() -> None:
    jobs = random_jobs(400, 7.0, 4)
    jobs["best_effort"] = False
    filler = random_jobs(400, 7.0, 5)
    filler["best_effort"], filler["program"] = True, np.arange(400, 800)
    filler[["ttft_s", "tpot_s"]] = (np.inf, np.inf)
    alone, beside = run(jobs), run(np.concatenate((jobs, filler)))
    assert beside.records["missed"][:400].sum() <= alone.records["missed"].sum() + 8
    assert beside.records["ended"].all()
