from dataclasses import replace

import numpy as np
import pytest

from planning.engine import EngineModel
from planning.limits import make_limits
from simulation.core.loop import Simulation
from simulation.core.metrics import Window, attained, summarize
from simulation.experiments.tuning import MARGINS, TUNING_SEED, tuned_capacity, variants
from simulation.studies.bound import fluid_bound_per_s
from simulation.studies.capacity import Attained, GiveUp, Search, attainment_of, run_system
from simulation.studies.systems import BASELINES, EXACT, NOISES, PLANNER, DistServe, engine_model
from tests.support.simulation_cases import STOCK, a100, jobs_at, random_jobs, run

CONFIG = {"budgets": [256, 2048], "drafts": [1, 2], "target": 0.9, "tolerance": 0.1, "seeds": [1]}


def steady(rate: float, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    jobs = jobs_at(np.cumsum(rng.exponential(1.0 / rate, 300)).tolist(), prompt=800, output=30, ttft_s=0.4, tpot_s=0.06)
    jobs["prompt_tokens"] = rng.integers(200, 1400, 300)
    return jobs


class Known(Search):
    """A search whose runs are a formula."""

    def measure(self, rate_per_s: float) -> Attained:
        self.known[rate_per_s] = Attained(1.0 - rate_per_s / 100.0, 1.0 - rate_per_s / 40.0)
        return self.known[rate_per_s]


@pytest.mark.parametrize("start_per_s", [0.3, 5.0, 80.0])
def test_bisection_finds_both_figures(start_per_s: float) -> None:
    search = Known(PLANNER, a100(), steady, 1)
    assert search.capacity("overall", start_per_s) == pytest.approx(10.0, rel=0.02)
    assert search.capacity("worst_tier", start_per_s) == pytest.approx(4.0, rel=0.02)


def test_giving_up_early_gives_the_same_capacity() -> None:
    early = Search(STOCK, a100(), steady, 1, tolerance=0.05).capacity("overall", 8.0)

    def holds(rate: float) -> bool:
        jobs = steady(rate, 1)
        return attainment_of(run_system(STOCK, a100(), jobs, 1), Window.of(jobs)).overall >= 0.9

    assert holds(early)
    assert not holds(early * 1.06)


def test_giving_up_stops_a_hopeless_run() -> None:
    jobs = steady(40.0, 1)
    simulation = Simulation(jobs, STOCK.engines(a100()), STOCK.dispatcher(a100(), jobs))
    simulation.run(GiveUp(jobs, Window.of(jobs), 0.9, every=8))
    assert simulation.left > 0


def test_giving_up_counts_what_can_no_longer_be_promised() -> None:
    jobs = steady(40.0, 1)
    simulation = Simulation(jobs, PLANNER.engines(a100()), PLANNER.dispatcher(a100(), jobs))
    gives_up, records = GiveUp(jobs, Window.of(jobs), 0.9, every=1), simulation.records
    records["missed"], records["replica"] = True, 0  # refused, and waiting best effort
    assert not gives_up(simulation)
    records["emitted_tokens"] = 1
    assert gives_up(simulation)
    records["emitted_tokens"], records["replica"] = 0, -1  # turned away
    assert gives_up(simulation)
    records["replica"], simulation.now_s = 0, float(jobs["arrival_s"].max()) + 0.5  # first tokens were due
    assert gives_up(simulation)


def test_a_run_that_reaches_the_target_exactly_is_not_given_up() -> None:
    jobs = jobs_at(np.linspace(0.0, 1.0, 220).tolist())
    simulation = Simulation(jobs, STOCK.engines(a100()), STOCK.dispatcher(a100(), jobs))
    gives_up = GiveUp(jobs, Window(0.0, 1.0), 0.9, every=1)
    simulation.records["missed"][:22] = True
    assert (~simulation.records["missed"]).mean() >= 0.9
    assert not gives_up(simulation)
    simulation.records["missed"][22] = True
    assert gives_up(simulation)


def test_tuning_takes_the_best_setting_on_seeds_of_its_own() -> None:
    seen: list[int] = []

    def tuning(rate: float, seed: int) -> np.ndarray:
        seen.append(seed)
        return steady(rate, seed)

    sarathi = next(system for system in BASELINES if system.name == "sarathi")
    found = tuned_capacity(sarathi, a100(), steady, tuning, 12.0, CONFIG)
    assert set(found["tuning"]) == {"budget 256", "budget 2048"}
    assert found["setting"] == max(found["tuning"], key=found["tuning"].get)
    assert set(seen) == {TUNING_SEED}
    assert found["worst_tier"]["median"] == found["overall"]["median"] > 0


def test_what_each_baseline_is_tuned_over() -> None:
    by_name = {system.name: system for system in BASELINES}
    assert len(variants(by_name["sarathi"], [128, 8192], [])) == 2
    assert list(variants(by_name["vllm-whole"], [128, 8192], [])) == ["as it is"]
    assert list(variants(replace(STOCK, drafts=1), [], [1, 3])) == ["1 drafts", "3 drafts"]
    shed = next(system for system in BASELINES if system.name == "edf-shed")
    fixed = [f"margin {margin}" for margin in MARGINS]
    assert list(variants(replace(shed, straying=EXACT), [], [])) == fixed, "without errors none is learnt"
    found = variants(replace(shed, straying=NOISES["noise10"]), [], [])
    assert list(found) == ["learnt margin", *fixed]
    assert found["margin 0.3"].engines(a100()).limits["slack_margin"] == pytest.approx(0.3)
    apart = variants(DistServe("d", "vllm"), [], [])
    assert list(apart) == [f"{sides}, {tokens}" for sides in ("1:1", "2:1", "1:2") for tokens in (2048, 16384)]
    for tokens in (2048, 16384):
        assert set(apart[f"2:1, {tokens}"].engines(a100()).limits["max_batch_tokens"][:2]) == {tokens}


@pytest.mark.parametrize("system", [PLANNER, *BASELINES], ids=lambda system: system.name)
def test_nobody_beats_the_bound(system) -> None:
    bound = fluid_bound_per_s(steady(1.0, 1), engine_model(a100()), drops_dearest=True)
    jobs = steady(1.1 * bound, 1)
    assert attainment_of(run(jobs, system), Window.of(jobs)).overall < 0.9


def engine_of(coef: np.ndarray, kv_capacity_tokens: int) -> EngineModel:
    return EngineModel(coef, make_limits(kv_capacity_tokens, max_iteration_s=0.2))


def test_the_bound_by_hand() -> None:
    # 100 prompt tokens and 10 decode steps at 1 ms per token, 20 ms per iteration of at most 100 ms.
    coef = np.array([1e-3, 0.02, 1e-3, 0.02, 0.0, 0.0, 0.0, 0.0])
    jobs = jobs_at([0.0] * 10, prompt=100, output=11, tpot_s=0.1)
    assert fluid_bound_per_s(jobs, engine_of(coef, 10**9), share=1.0) == pytest.approx(0.8 / 0.110)
    assert fluid_bound_per_s(jobs, engine_of(coef, 10**9), share=0.9) == pytest.approx(0.8 / 0.110 / 0.9)
    jobs["output_tokens"][0] = 111
    dear, cheap = (fluid_bound_per_s(jobs, engine_of(coef, 10**9), 0.9, drops) for drops in (False, True))
    assert dear < cheap == pytest.approx(0.8 / 0.110 / 0.9)
    jobs["output_tokens"][0] = 11
    # With room for one request's KV at a time, a request's ten steps of 106 tokens are what counts.
    tight = fluid_bound_per_s(jobs, engine_of(coef, 106), share=1.0)
    assert tight < 0.8 / 0.110


def test_first_tokens_bound_the_length_of_iterations_by_hand() -> None:
    # A prompt of 100 tokens takes 120 ms, its first token is due after 180: nine of ten arrivals must find the
    # iteration in flight over within 60 ms, so the mean iteration takes 66.7 ms at most, 20 of them without work.
    coef = np.array([1e-3, 0.02, 1e-3, 0.02, 0.0, 0.0, 0.0, 0.0])
    jobs = jobs_at([0.0] * 10, prompt=100, output=11, ttft_s=0.18, tpot_s=0.1)
    bound = fluid_bound_per_s(jobs, engine_of(coef, 10**9), share=0.9, counts_waits=True)
    assert bound == pytest.approx((1 - 0.02 / (0.06 / 0.9)) / 0.110 / 0.9, rel=0.01)
    jobs["ttft_s"] = 0.12
    assert fluid_bound_per_s(jobs, engine_of(coef, 10**9), share=0.9, counts_waits=True) == 0.0


@pytest.mark.parametrize("system", [PLANNER, *BASELINES], ids=lambda system: system.name)
def test_nobody_beats_the_bound_of_tight_first_tokens(system) -> None:
    def make(rate: float) -> np.ndarray:
        jobs = steady(rate, 1)
        jobs["prompt_tokens"], jobs["output_tokens"], jobs["predicted_tokens"] = 60, 100, 100
        jobs["ttft_s"] = 0.032
        return jobs

    fluid, bound = (fluid_bound_per_s(make(1.0), engine_model(a100()), counts_waits=waits) for waits in (False, True))
    assert 0.0 < bound < 0.9 * fluid
    jobs = make(1.1 * bound)
    assert attainment_of(run(jobs, system), Window.of(jobs)).overall < 0.9


def test_refused_and_unfinished_requests_are_misses_of_the_class_they_asked_for() -> None:
    simulation = run(jobs_at([0.0] * 6, prompt=4000, output=2, ttft_s=0.6), PLANNER)
    jobs, records = simulation.jobs, simulation.records
    met = attained(jobs, records)["dslo"]
    assert records["ended"].all()  # best effort in the end
    assert 0 < met.sum() < 6
    np.testing.assert_array_equal(met, records["promised"])
    figures = summarize(jobs, records, simulation.engines.state, Window(0.0, 1.0))
    assert figures["refused"] == pytest.approx(1 - met.mean())
    assert figures["kept"] == 1.0
    records["late_tokens"][np.flatnonzero(met)[0]] = 1
    figures = summarize(jobs, records, simulation.engines.state, Window(0.0, 1.0))
    assert figures["kept"] == pytest.approx(1 - 1 / met.sum())
    records["late_tokens"][np.flatnonzero(met)[0]] = 0
    figures = summarize(jobs, records, simulation.engines.state, Window(0.0, 1.0))
    assert figures["attainment"]["dslo"] == pytest.approx(met.mean())


def test_a_program_attains_when_all_its_rounds_do() -> None:
    simulation = run(jobs_at([0.0, 1.0, 2.0, 3.0]), STOCK)
    simulation.jobs["program"] = [0, 0, 2, 2]
    simulation.records["late_tokens"][1] = 1
    assert attained(simulation.jobs, simulation.records)["dslo"][[0, 2]].tolist() == [False, True]
    assert Window(0.0, 9.0).first_requests(simulation.jobs).tolist() == [0, 2]


def test_warm_up_and_cool_down_are_cut_by_time() -> None:
    jobs = random_jobs(100, 1.0, 1)
    jobs["best_effort"] = False
    jobs["arrival_s"] = np.linspace(0.0, 100.0, 100)
    heads = Window.of(jobs, cut=0.15).first_requests(jobs)
    assert jobs["arrival_s"][heads].min() >= 15.0
    assert jobs["arrival_s"][heads].max() <= 85.0


@pytest.mark.parametrize("apart", [False, True])
def test_what_a_system_is_judged_by_does_not_depend_on_how_it_ran(apart: bool) -> None:
    jobs = steady(40.0, 1)
    jobs["program"] //= 2
    jobs["program"] *= 2
    jobs["follower"][::2] = np.arange(1, len(jobs), 2)
    jobs["arrival_s"][1::2] = np.inf
    system = DistServe("apart", "vllm") if apart else STOCK
    simulation = Simulation(system.jobs(jobs), system.engines(a100()), system.dispatcher(a100(), jobs))
    before = Window.of(simulation.jobs)
    simulation.run()
    assert np.isfinite(simulation.jobs["arrival_s"]).all()
    assert simulation.jobs["arrival_s"].max() > before.end_s * 2  # the last follower comes long after
    assert before == Window.of(simulation.jobs) == Window.of(jobs)
