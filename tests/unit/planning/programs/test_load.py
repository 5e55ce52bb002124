"""Work of programs, and whether it can all be served in time."""

import itertools

import numpy as np
import pytest

from planning.programs.graph import to_stages
from planning.programs.load import WorkCosts, demand, stage_work_s, work_costs
from profiles.store import load_profile
from tests.support.program_cases import graph

COSTS = WorkCosts(prompt_token_s=1e-3, pair_s=1e-6, output_token_s=1e-2, kv_token_s=1e-5)


def test_work_is_prompts_by_their_context_and_outputs_by_theirs() -> None:
    stages = to_stages(
        graph((0, 1000.0, 10.0, 0.0, 1.0, 0), (1, 100.0, 20.0, 2.0, 3.0, 0), (1, 300.0, 0.0, 2.0, 3.0, 0))
    )
    first, second = stage_work_s(stages, COSTS)
    assert first == pytest.approx(1000 * (1e-3 + 1e-6 * 1000) + 10 * (1e-2 + 1e-5 * 1000))
    assert second == pytest.approx(400 * (1e-3 + 1e-6 * 200) + 20 * (1e-2 + 1e-5 * 200)), (
        "siblings by their mean prompt"
    )


def test_longer_contexts_cost_more_on_a_measured_engine() -> None:
    costs = work_costs(np.array(load_profile("h200_sxm__llama-3.1-8b").coefficients))
    assert all(cost > 0.0 for cost in costs)
    short, long = (stage_work_s(to_stages(graph((0, n, 0.0, 0.0, 1.0, 0))), costs)[0] for n in (1e3, 1e5))
    assert long > 100 * short


@pytest.mark.parametrize("seed", range(20))
def test_demand_is_that_of_the_worst_deadline(seed: int) -> None:
    rng = np.random.default_rng(seed)
    due_s, work_s, replicas = rng.uniform(-2.0, 30.0, 9), rng.uniform(0.0, 9.0, 9), int(rng.integers(1, 4))
    worst = 0.0
    for end_s in due_s[due_s > 5.0]:
        until = (due_s <= end_s) & (due_s > 5.0)
        worst = max(worst, float(work_s[until].sum()) / (replicas * (end_s - 5.0)))
    assert demand(due_s, work_s, 5.0, replicas) == pytest.approx(worst)


@pytest.mark.parametrize("seed", range(20))
def test_demand_of_one_says_that_earliest_deadline_first_keeps_all(seed: int) -> None:
    """The exact schedule of one replica, by every order of service."""
    rng = np.random.default_rng(seed)
    due_s, work_s = rng.uniform(1.0, 12.0, 5), rng.uniform(0.1, 4.0, 5)
    fits = any((np.cumsum(work_s[list(o)]) <= due_s[list(o)]).all() for o in itertools.permutations(range(5)))
    assert (demand(due_s, work_s, 0.0, 1) <= 1.0) == fits


def test_nothing_open_and_no_replica() -> None:
    assert demand(np.zeros(0), np.zeros(0), 0.0, 2) == 0.0
    assert demand(np.array([9.0]), np.array([1.0]), 0.0, 0) == np.inf
