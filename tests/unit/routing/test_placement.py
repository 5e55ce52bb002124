"""Placement over a fleet against asking every replica by itself."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planning.admission.plan import REASONS, AdmitReason, plan_admission
from planning.admission.search import ADMITTED
from planning.engine import EngineModel
from planning.forecast.rollout import advance
from planning.limits import make_limits
from routing.fleet_state import (
    RESERVED,
    SHARED,
    FleetState,
    add_request,
    advance_fleet,
    make_fleet_state,
    recompute_load,
    remove_request,
)
from routing.placement import NO_SCORES, NOWHERE, PLACEMENT, CandidateOrder, check_replica, place
from routing.placement import _dominates as dominates
from routing.scores import MOST_LOADED
from tests.support.examples import examples
from tests.support.planning_cases import COEFS, draw_requests, start_decoding

LIMITS = make_limits(100_000)


def fleet_of(loads: list[int], tiers: list[int] | None = None, seed: int = 0) -> FleetState:
    """Open replicas with ``loads`` decodes each, TPOT 50 ms."""
    rng, fleet = np.random.default_rng(seed), make_fleet_state(len(loads), 80)
    fleet.coefs[:], fleet.pessimistic_coefs[:], fleet.limits[:] = COEFS[0], COEFS[0], LIMITS
    fleet.replicas["is_open"], fleet.replicas["count"] = True, loads
    fleet.replicas["tier"] = tiers or SHARED
    for r, load in enumerate(loads):
        table = requests(rng, load, 100 * r + 1)
        start_decoding(rng, table)
        table["arrival_s"] = 0.04 - table["ttft_s"] - table["emitted_tokens"] * table["tpot_s"]
        fleet.tables[r, :load] = table
        recompute_load(fleet, r)
    return fleet


def requests(rng: np.random.Generator, rows: int, first_id: int, tier: int = 0) -> np.ndarray:
    table = draw_requests(rng, rows, first_id)
    table["ttft_s"], table["tpot_s"], table["deadline_s"], table["tier"] = 0.5, 0.05, np.inf, tier
    return table


def put(fleet: FleetState, rows: np.ndarray, max_hops: int = 4) -> np.ndarray:
    placements = np.zeros(len(rows), dtype=PLACEMENT)
    place(fleet, rows, 0.0, CandidateOrder(NO_SCORES, MOST_LOADED, max_hops), placements)
    return placements


def new(rows: int = 1, tier: int = 0) -> np.ndarray:
    return requests(np.random.default_rng(7), rows, 10_000, tier)


def test_the_most_loaded_replica_that_attains_is_taken() -> None:
    fleet = fleet_of([5, 20, 10])
    placed = put(fleet, new())[0]
    assert (placed["replica"], placed["hops"], REASONS[placed["reason"]]) == (1, 1, AdmitReason.ADMITTED)
    assert fleet.replicas["count"].tolist() == [5, 21, 10]
    assert fleet.tables[1, 20]["id"] == 10_000


def test_own_tier_then_shared_then_the_nearest_tighter_one_and_never_a_looser_or_a_reserved() -> None:
    order, tiers = [], [0, 1, 2, SHARED, 3, RESERVED]
    fleet = fleet_of([3, 3, 3, 3, 3, 0], tiers=tiers)
    for _ in range(5):
        placed = put(fleet, new(tier=2))[0]
        order.append(int(placed["replica"]))
        fleet.replicas[order[-1]]["is_open"] = False
    assert order == [2, 3, 1, 0, NOWHERE]
    assert fleet.replicas["tier"].tolist() == tiers, "placement gives no replica to another tier"


def test_closed_and_full_replicas_take_nothing() -> None:
    fleet = fleet_of([5, 5])
    fleet.replicas["is_open"] = False
    assert put(fleet, new())[0]["replica"] == NOWHERE
    fleet = fleet_of([80])
    assert put(fleet, new())[0]["replica"] == NOWHERE


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("prompt_tokens", 200_000, AdmitReason.KV_FULL),
        ("tpot_s", 1e-4, AdmitReason.WOULD_BREAK_ADMITTED),
        ("ttft_s", 1e-4, AdmitReason.TTFT_UNATTAINABLE),
    ],
)
def test_the_quick_check_says_what_stands_against_a_request(field: str, value: float, reason: AdmitReason) -> None:
    asked = new()
    asked["output_tokens"] = asked["output_cap_tokens"] = 5000  # an early first token helps few of them
    asked[field] = value
    placed = put(fleet_of([5, 5]), asked)[0]
    assert (placed["replica"], REASONS[placed["reason"]]) == (NOWHERE, reason)
    assert placed["first_s"] == math.inf


def test_a_replica_with_all_sequences_taken_is_full() -> None:
    fleet = fleet_of([5, 3])
    fleet.limits["max_running"] = [5, 8]
    recompute_load(fleet, 0)
    assert fleet.replicas[0]["load"] == 1.0
    assert put(fleet, new())[0]["replica"] == 1
    fleet.tables[0, 0]["best_effort"] = True  # gives its sequence up
    recompute_load(fleet, 0)
    fleet.replicas[1]["is_open"] = False
    assert put(fleet, new())[0]["replica"] == 0


@examples(150)
@given(st.integers(0, 2**32 - 1))
def test_a_placement_is_an_admission_on_that_replica(seed: int) -> None:
    """Exactly: same verdict and prediction as the planner's own, for the chosen replica and for all others."""
    rng = np.random.default_rng(seed)
    fleet = fleet_of(rng.integers(0, 60, 4).tolist(), seed=seed)
    asked = requests(rng, 1, 10_000)
    asked["prompt_tokens"] = int(rng.choice([200, 2000, 12_000]))
    plans = []
    for r, state in enumerate(fleet.replicas):
        running = fleet.tables[r, : state["count"]]
        plans.append(plan_admission(EngineModel(fleet.coefs[r], fleet.limits[r]), running, asked, 0.0))
        assert (REASONS[check_replica(fleet, r, asked[0], 0.0)] == AdmitReason.ADMITTED) == plans[r].accepted[0]
    placed = put(fleet, asked)[0]
    if placed["replica"] != NOWHERE:
        plan = plans[placed["replica"]]
        assert plan.accepted[0]
        assert placed["first_s"] == pytest.approx(plan.predicted_ttft_s[0])
        assert placed["tpot_s"] == pytest.approx(plan.predicted_tpot_s[0])


@examples(60)
@given(st.integers(0, 2**32 - 1))
def test_the_cached_sums_are_what_a_fresh_count_gives(seed: int) -> None:
    rng = np.random.default_rng(seed)
    fleet = fleet_of(rng.integers(0, 30, 3).tolist(), seed=seed)
    for row in requests(rng, 5, 10_000):
        add_request(fleet, int(rng.integers(0, 3)), row)
    kept = fleet.replicas.copy()
    for r in range(3):
        recompute_load(fleet, r)
    for name in ("token_rate", "rest_rate", "held_tokens", "pace_s", "load", "backlog_tokens", "peak_tokens", "step_s"):
        np.testing.assert_allclose(fleet.replicas[name], kept[name])


def test_the_fleet_advances_as_each_replica_would_alone() -> None:
    fleet = fleet_of([5, 9])
    alone = fleet.tables[1, :9].copy()
    free_at_s, *_ = advance(EngineModel(fleet.coefs[1], LIMITS), alone, 0.0, 0.0, 0.3, True)
    advance_fleet(fleet, 0.3, True)
    left = alone[alone["running"]]
    assert fleet.replicas[1]["free_at_s"] == free_at_s
    assert (fleet.tables[1, : fleet.replicas[1]["count"]] == left).all()
    assert fleet.replicas[1]["count"] < 9  # some were to end by then


def test_a_lost_promise_blocks_no_placement() -> None:
    fleet = fleet_of([5])
    fleet.tables[0, 0]["arrival_s"] -= 10.0
    recompute_load(fleet, 0)
    assert put(fleet, new())[0]["replica"] == 0


def test_what_a_policy_prefers_comes_first_and_what_it_shuns_never() -> None:
    fleet, asked = fleet_of([5, 20, 10]), new()
    placements = np.zeros(1, dtype=PLACEMENT)
    for scores, chosen in (([3.0, 1.0, 2.0], 0), ([-np.inf, 1.0, 2.0], 2), ([-np.inf] * 3, NOWHERE)):
        place(fleet, asked, 0.0, CandidateOrder(np.array([scores]), MOST_LOADED, 4), placements)
        assert placements[0]["replica"] == chosen


@examples(60)
@given(st.integers(0, 2**32 - 1))
def test_ruling_replicas_out_inside_a_burst_changes_no_verdict(seed: int) -> None:
    """A burst is placed as its requests one after the other would be, shortest first."""
    rng = np.random.default_rng(seed)
    loads = rng.integers(20, 75, 3).tolist()
    asked = requests(rng, 8, 10_000)
    asked["prompt_tokens"] = rng.integers(500, 12_000, 8)
    asked["ttft_s"], asked["output_tokens"] = rng.choice([0.1, 0.3, 1.0], 8), 100
    in_turn, together = np.tile([3.0, 2.0, 1.0], (8, 1)), np.zeros(8, dtype=PLACEMENT)
    place(fleet_of(loads, seed=seed), asked, 0.0, CandidateOrder(in_turn, MOST_LOADED, 3), together)
    fleet, alone = fleet_of(loads, seed=seed), np.zeros(8, dtype=PLACEMENT)
    for i in np.argsort(asked["prompt_tokens"], kind="stable"):
        place(fleet, asked[i : i + 1], 0.0, CandidateOrder(in_turn[:1], MOST_LOADED, 3), alone[i : i + 1])
    assert together["replica"].tolist() == alone["replica"].tolist()


def test_a_request_that_is_taken_out_leaves_the_sums_of_the_others() -> None:
    fleet = fleet_of([5])
    kept = fleet.replicas.copy()
    add_request(fleet, 0, new()[0])
    assert remove_request(fleet, 0, 10_000)
    assert not remove_request(fleet, 0, 10_000)
    assert fleet.replicas["load"] == kept["load"]
    assert fleet.tables[0, :5]["id"].tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("emptier", [1, 5])
def test_a_few_checks_find_the_emptier_replicas_of_a_large_fleet(emptier: int) -> None:
    """Thirty full replicas: the gradient bisects instead of asking one full replica after the other."""
    fleet, asked = fleet_of([5] * (30 + emptier)), new()
    asked["prompt_tokens"] = 3000
    for r in range(30):
        while REASONS[check_replica(fleet, r, asked[0], 0.0)] == AdmitReason.ADMITTED:
            asked["id"] += 1
            add_request(fleet, r, asked[0])
    placed = put(fleet, asked, max_hops=4)[0]
    assert placed["replica"] >= 30


def test_what_no_idle_replica_attains_is_checked_nowhere() -> None:
    asked = new()
    asked["prompt_tokens"], asked["ttft_s"] = 500, 1e-4
    placed = put(fleet_of([0, 0]), asked)[0]
    assert (placed["replica"], placed["hops"]) == (NOWHERE, 0)


@pytest.mark.parametrize(
    ("field", "easier"),
    [("prompt_tokens", -1), ("output_tokens", -1), ("ttft_s", 0.01), ("tpot_s", 0.01), ("deadline_s", 0.01)],
)
def test_only_what_is_easier_in_no_respect_dominates(field: str, easier: float) -> None:
    refused = new()
    refused["output_tokens"], refused["deadline_s"] = 20, 9.0
    row = refused.copy()
    assert dominates(row[0], refused[0])
    row[field] -= easier
    assert dominates(row[0], refused[0])
    row[field] += 2 * easier
    assert not dominates(row[0], refused[0])


def test_of_equally_wanted_replicas_the_first_is_taken() -> None:
    fleet, placements = fleet_of([5, 5, 5]), np.zeros(1, dtype=PLACEMENT)
    place(fleet, new(), 0.0, CandidateOrder(np.array([[1.0, 2.0, 2.0]]), MOST_LOADED, 4), placements)
    assert placements[0]["replica"] == 1


def test_a_promise_that_will_be_lost_anyway_closes_its_replica_to_nobody() -> None:
    """Its next token is on time; the pace that it was promised cannot be held to the end."""
    fleet = fleet_of([5])
    row = fleet.tables[0, 0]
    row["tpot_s"], row["output_tokens"] = 1e-3, row["emitted_tokens"] + 200
    row["arrival_s"] = 0.04 - row["ttft_s"] - row["emitted_tokens"] * row["tpot_s"]
    recompute_load(fleet, 0)
    assert check_replica(fleet, 0, new()[0], 0.0) == ADMITTED


def test_a_mirror_that_lags_is_moved_on_before_it_is_checked_and_not_else() -> None:
    fleet = fleet_of([20, 5])
    before = fleet.tables["emitted_tokens"][:, 0].copy()
    advance_fleet(fleet, 0.2, False, 0.5)
    assert fleet.replicas["free_at_s"].tolist() == [0.0, 0.0], "both are less behind than they may be"
    placements = np.zeros(1, dtype=PLACEMENT)
    place(fleet, new(), 0.2, CandidateOrder(NO_SCORES, MOST_LOADED, 1, is_lagging=True), placements)
    assert placements[0]["replica"] == 0
    assert (fleet.replicas["free_at_s"] >= 0.2).tolist() == [True, False]
    assert (fleet.tables["emitted_tokens"][:, 0] > before).tolist() == [True, False]
    advance_fleet(fleet, 0.6, False, 0.5)
    assert (fleet.replicas["free_at_s"] >= 0.2).all()
