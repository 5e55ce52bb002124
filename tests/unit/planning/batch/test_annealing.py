"""Priority mapping by annealing, against all plans there are."""

import numpy as np
import pytest

from planning.batch.annealing import Jobs, anneal, in_sequence, objective, predicted_jobs
from planning.batch.registry import batch_policy
from planning.engine import EngineModel
from planning.limits import make_limits
from planning.tables import request_table
from simulation.studies.exhaustive import best_plan

COEF = np.array([31.1e-6, 12.4e-3, 54.0e-6, 9.98e-3, 8.34e-8, 2.7e-9, 35.4e-6, 1e-3])


def waiting(count: int, seed: int) -> np.ndarray:
    """Requests at time 0, half with a deadline and half with TTFT and TPOT, not all of which can be met."""
    rng = np.random.default_rng(seed)
    table = request_table(count)
    table["id"], table["best_effort"] = np.arange(count) + 1, False
    table["prompt_tokens"] = rng.integers(20, 2000, count)
    table["output_tokens"], table["output_cap_tokens"] = rng.integers(20, 800, count), 4096
    by_deadline = rng.random(count) < 0.5
    table["deadline_s"][by_deadline] = rng.choice([5.0, 10.0, 30.0], by_deadline.sum())
    table["ttft_s"][~by_deadline] = rng.choice([1.0, 3.0, 10.0], (~by_deadline).sum())
    table["tpot_s"][~by_deadline] = 0.05
    return table


def model(most: int) -> EngineModel:
    return EngineModel(COEF, make_limits(100_000, max_running=most, max_batch_tokens=8192))


@pytest.mark.parametrize("most", [1, 2, 4])
@pytest.mark.parametrize("count", [2, 4, 6])
def test_annealing_comes_near_the_best_plan(count: int, most: int) -> None:
    values, arrival_order, scratch = [], [], np.zeros((2, count + 1))
    for seed in range(12):
        jobs = predicted_jobs(model(most), waiting(count, seed), 0.0, 0, 0.0)
        _plan, best = best_plan(jobs, most)
        found, value = anneal(jobs, most, seed + 1)
        assert value <= best * (1 + 1e-12)
        assert objective(jobs, found, scratch)[0] == pytest.approx(value)
        assert np.bincount(found).max() <= most
        values.append(value / best)
        arrival_order.append(objective(jobs, in_sequence(jobs, np.arange(count), most), scratch)[0] / best)
    assert np.mean(values) >= 0.9
    if most < count:
        assert min(arrival_order) < 0.97, "there is something to find"


def test_beside_a_batch_that_runs_the_plan_keeps_to_what_is_free() -> None:
    jobs = predicted_jobs(model(4), waiting(5, 3), 0.0, 3, 6.0)
    best, value = best_plan(jobs, 4)
    found, annealed = anneal(jobs, 4, 9)
    assert (found == 0).sum() <= 1
    assert (best == 0).sum() <= 1
    assert annealed >= 0.99 * value


def test_the_objective_by_hand() -> None:
    """Two jobs of 2 s and 1 s, each alone; only the second has a bound, which it misses behind the first."""
    whole = np.array([[0.0, 2.0, 3.0], [0.0, 1.0, 3.0]])
    bounds = np.array([[np.inf] * 3, [np.inf, np.inf, 1.5]])
    jobs = Jobs(whole / 2, whole, np.array([1, 1]), bounds, 0, 0.0, 2)
    scratch = np.zeros((2, 3))
    assert objective(jobs, np.array([0, 1]), scratch) == (1 / 5.0, 1)
    assert objective(jobs, np.array([1, 0]), scratch) == (2 / 4.0, 2)
    assert objective(jobs, np.array([0, 0]), scratch) == (1 / 6.0, 1)


def test_a_newcomer_waits_for_the_next_batch_where_it_would_break_what_runs_with_it() -> None:
    """One slot: of two that wait the plan takes the one that still meets its deadline first."""
    table = waiting(2, 0)
    table["ttft_s"], table["tpot_s"], table["prompt_tokens"], table["output_tokens"] = np.inf, np.inf, 100, [600, 100]
    table["deadline_s"] = [60.0, 2.0]
    tokens = np.zeros(2, dtype=np.int32)
    batch_policy("annealing").form(model(1), table, 0.0, tokens)
    assert tokens.tolist() == [0, 100]
    batch_policy("vllm").form(model(1), table, 0.0, tokens)
    assert tokens.tolist() == [100, 0]
