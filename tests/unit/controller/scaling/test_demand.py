"""Demand as rates, and the replicas that it takes by the performance model."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.scaling.demand import Demand, Hardware, Load, Need, pace_of, plan_needs, prefill_replicas, share_budget
from controller.scaling.tiers import Tier, TierTable
from profiles.kernels import iteration_s
from profiles.store import load_profile

H100 = Hardware(load_profile("h100_sxm__llama-3.1-8b").coefficients, 400_000, 0.2)
TABLE = TierTable.of(
    1, [Tier("tight", 0.3, 0.02), Tier("loose", 3.0, 0.1), Tier("flex", best_effort=True, output_tokens=10)]
)
LOAD = Load(20.0, 20_000.0, 4_000.0)  # 1000 prompt and 200 output tokens each


def test_rates_over_the_window_and_each_request_once() -> None:
    demand = Demand(look_back_period_s=30.0)
    for second in range(60):
        demand.note(second, "tight", 100, 20, float(second))
        demand.note(second, "tight", 100, 20, second + 0.5)  # asks again
    loads = demand.loads(60.0)
    assert loads == {"tight": Load(1.0, 100.0, 20.0)}
    assert loads["tight"].context_tokens == 110.0
    assert demand.loads(1000.0) == {}


def test_who_waits_for_long_is_demand_as_long_as_that() -> None:
    """Else nothing but their prompts asked for replicas: here a third of one."""
    demand = Demand(look_back_period_s=30.0)
    for second in range(600):
        demand.loads(float(second))
        for uid in range(300):
            demand.note(uid, "loose", 100, 1000, float(second))
    loads = demand.loads(600.0)
    assert loads["loose"].requests_per_s == pytest.approx(10.0)
    by_queue, both = (plan_needs(TABLE, each, {"loose": 30_000.0}, H100, 0.7)[1] for each in ({}, loads))
    assert by_queue.busy < 0.4 < 1.0 < both.busy


def test_a_first_burst_is_not_taken_for_a_rate() -> None:
    demand = Demand()
    for uid in range(10):
        demand.note(uid, "tight", 100, 20, 0.0)
    assert demand.loads(0.1)["tight"].requests_per_s == 2.0


@pytest.mark.parametrize("period_s", [10.0, 120.0])
def test_a_steady_rate_is_the_same_over_another_period(period_s: float) -> None:
    demand = Demand(look_back_period_s=30.0)
    for second in range(200):
        demand.note(second, "tight", 100, 20, float(second))
        if second == 100:
            demand.look_back(period_s, 100.0)
        if second > 30:
            assert demand.loads(float(second))["tight"].requests_per_s == pytest.approx(1.0, abs=0.11)
    assert demand.loads(199.0 + period_s)["tight"].requests_per_s == 1.0 / period_s


@given(st.floats(0.5, 200.0), st.integers(50, 8000), st.integers(2, 1000), st.floats(0.015, 0.19))
def test_so_many_replicas_make_their_iterations_in_exactly_the_pace(
    rate: float, prompt: int, output: int, pace_s: float
) -> None:
    load, roomy = Load(rate, rate * prompt, rate * output), H100._replace(kv_capacity_tokens=10**9)
    replicas = roomy.replicas_for(load, pace_s)
    tokens, decodes = (rate * (prompt + output)) / replicas * pace_s, rate * output / replicas * pace_s
    pairs = rate * prompt / replicas * pace_s * prompt / 2
    step_s = iteration_s(H100.coefficients, tokens, decodes * load.context_tokens, pairs, decodes, 0.0)
    assert step_s == pytest.approx(pace_s)


def test_short_kv_takes_shorter_iterations_and_more_replicas() -> None:
    roomy, short = H100._replace(kv_capacity_tokens=10**9), H100._replace(kv_capacity_tokens=50_000)
    at_pace = LOAD.decode_tokens_per_s * 0.1 * LOAD.context_tokens / 50_000
    assert roomy.replicas_for(LOAD, 0.1) < short.replicas_for(LOAD, 0.1) < at_pace


def test_an_impossible_pace_needs_no_replica() -> None:
    assert H100.replicas_for(LOAD, 1e-4) == math.inf
    assert H100.replicas_for(Load(), 1e-4) == 0.0
    table = TierTable.of(1, [Tier("a", 0.1, 1e-4)])
    assert plan_needs(table, {"a": LOAD}, {"a": 1e6}, H100, 0.7, "refuse") == [Need(0, 0.0)]
    refused = TierTable.of(1, [Tier("a", 0.1, 1e-4, unattainable="refuse")])
    assert plan_needs(refused, {"a": LOAD}, {"a": 1e6}, H100, 0.7) == [Need(0, 0.0)]
    assert prefill_replicas(refused, {"a": LOAD}, {}, H100._replace(max_iteration_s=0.0), 0.7) == 0.0


def test_what_has_an_impossible_pace_and_is_served_best_effort_takes_replicas_as_that() -> None:
    """It needed none: an overloaded fleet that had become too slow for its tiers was shrunk."""
    best_effort = TierTable.of(1, [Tier("a", best_effort=True)])
    for queue in ({}, {"a": 1e6}):
        (need,) = plan_needs(TierTable.of(1, [Tier("a", 0.1, 1e-4)]), {"a": LOAD}, queue, H100, 0.7)
        assert need == plan_needs(best_effort, {"a": LOAD}, queue, H100, 0.7)[0]
        assert need.replicas > 0


def test_tighter_paces_and_queues_take_more() -> None:
    assert H100.replicas_for(LOAD, 0.015) > H100.replicas_for(LOAD, 0.1)
    assert H100.replicas_for(LOAD, 0.1, 10_000.0) > H100.replicas_for(LOAD, 0.1)


def test_a_deadline_is_a_pace() -> None:
    assert pace_of(Tier("report", e2e_s=60.0), LOAD) == 0.3
    assert pace_of(Tier("flex", best_effort=True), LOAD) == math.inf


def test_what_a_tight_tier_leaves_serves_looser_ones() -> None:
    alone = plan_needs(TABLE, {"loose": LOAD}, {}, H100, 0.7)[1]
    beside = plan_needs(TABLE, {"tight": Load(0.1, 100.0, 20.0), "loose": LOAD}, {}, H100, 0.7)
    assert beside[0].replicas == 1
    assert beside[1].replicas < alone.replicas
    assert beside[1].busy == alone.busy


@given(st.floats(0, 50), st.floats(0, 50), st.floats(0, 50))
def test_sharing_never_takes_more_than_silos_nor_less_than_the_work(tight: float, loose: float, flex: float) -> None:
    rates = {"tight": tight, "loose": loose, "flex": flex}
    loads = {name: Load(rate, 1000 * rate, 200 * rate) for name, rate in rates.items() if rate > 1e-6}
    needs = plan_needs(TABLE, loads, {}, H100, 0.7)
    silos = [plan_needs(TABLE, {name: load}, {}, H100, 0.7) for name, load in loads.items()]
    assert sum(need.replicas for need in needs) <= sum(need.replicas for silo in silos for need in silo)
    least = H100.replicas_for(Load(*np.sum(list(loads.values()), axis=0)), math.inf) if loads else 0.0
    assert sum(need.replicas for need in needs) >= least - 1e-6


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), min_size=1, max_size=5), st.integers(0, 30))
def test_a_budget_is_kept_and_used(bounds: list[tuple[int, int]], budget: int) -> None:
    lows, scores = [low for low, _ in bounds], [max(bound) for bound in bounds]
    shares = share_budget(lows, scores, budget)
    assert sum(shares) == min(budget, sum(scores))
    assert all(share <= score for share, score in zip(shares, scores, strict=True))
    if sum(lows) <= budget:
        assert all(share >= low for share, low in zip(shares, lows, strict=True))


def test_competing_tiers_are_satisfied_alike() -> None:
    assert share_budget([1, 0, 0], [4, 8, 4], 8) == [2, 4, 2]
    assert share_budget([3, 2], [5, 5], 4) == [3, 1], "not enough for the minimums: the tightest first"


def test_a_pace_that_needs_drafts_takes_replicas_and_one_that_does_not_takes_no_more() -> None:
    load, drafting = Load(5.0, 2000.0, 1000.0), H100._replace(drafts=4, acceptance=0.7)
    least_s = H100.prompt_s(1)
    assert H100.replicas_for(load, 0.7 * least_s) == math.inf
    assert 0.0 < drafting.replicas_for(load, 0.7 * least_s) < 10.0
    assert 0.0 < drafting.replicas_for(load, 10 * least_s) <= H100.replicas_for(load, 10 * least_s)
    assert drafting._replace(acceptance=0.0).replicas_for(load, 0.7 * least_s) == math.inf
