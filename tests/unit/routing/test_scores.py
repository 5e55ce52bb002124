"""What a request wants of a replica by its sums, against asking what the replica's load becomes."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planning.engine import EngineModel
from planning.limits import make_limits
from routing.fleet_state import FleetState, add_request, make_fleet_state, recompute_load
from routing.placement import NO_SCORES, PLACEMENT, CandidateOrder, place
from routing.scores import (
    FULL_FROM,
    LEAST_ADDED,
    MOST_LOADED,
    PROMPTS_DUE_S,
    ROOM_UNTIL,
    base_weight,
    score_replica,
    score_replicas,
)
from tests.support.examples import examples
from tests.support.planning_cases import COEFS, draw_requests, start_decoding

TIGHT_S, LOOSE_S = 0.03, 0.2


def fleet_of(*paces_s: list[float], seed: int = 0) -> FleetState:
    """Open replicas, one for each list of the TPOTs of what decodes there."""
    rng, fleet = np.random.default_rng(seed), make_fleet_state(len(paces_s), 80)
    fleet.coefs[:], fleet.pessimistic_coefs[:], fleet.limits[:] = COEFS[0], COEFS[0], make_limits(400_000)
    fleet.replicas["is_open"] = True
    for r, paces in enumerate(paces_s):
        table = draw_requests(rng, len(paces), 100 * r + 1)
        table["ttft_s"], table["tpot_s"], table["deadline_s"], table["tier"] = 0.5, paces, np.inf, 0
        table["prompt_tokens"], table["output_tokens"] = 500, 200
        start_decoding(rng, table)
        table["arrival_s"] = 0.0 - table["ttft_s"] - table["emitted_tokens"] * table["tpot_s"]
        fleet.tables[r, : len(paces)], fleet.replicas[r]["count"] = table, len(paces)
        recompute_load(fleet, r)
    return fleet


def asked(tpot_s: float, prompt_tokens: int = 300, request_id: int = 10_000) -> np.ndarray:
    row = draw_requests(np.random.default_rng(3), 1, request_id)
    row["ttft_s"], row["tpot_s"], row["deadline_s"], row["arrival_s"], row["tier"] = 2.0, tpot_s, np.inf, 0.0, 0
    row["prompt_tokens"] = prompt_tokens
    return row


def congestion(fleet: FleetState) -> float:
    """Sum of squared loads, prompts that wait among them."""
    state = fleet.replicas
    return float(((state["load"] + state["backlog_tokens"] * state["prompt_token_s"] / PROMPTS_DUE_S) ** 2).sum())


@examples(60)
@given(
    st.lists(st.lists(st.sampled_from([TIGHT_S, 0.05, LOOSE_S]), max_size=12), min_size=1, max_size=4),
    st.sampled_from([TIGHT_S, 0.05, LOOSE_S]),
    st.integers(1, 5000),
)
def test_the_least_added_load_is_by_how_much_congestion_grows(
    paces_s: list[list[float]], tpot_s: float, prompt_tokens: int
) -> None:
    """In a full fleet, to within the one token that a prompt yields itself: its last chunk is no backlog."""
    row = asked(tpot_s, prompt_tokens)
    for r in range(len(paces_s)):
        fleet = fleet_of(*paces_s)
        engine = EngineModel(fleet.pessimistic_coefs[r], fleet.limits[r])
        score = score_replica(LEAST_ADDED, engine, fleet.replicas[r], row[0], 0.0, 1.0)
        before = congestion(fleet)
        add_request(fleet, r, row[0])
        assert before - congestion(fleet) == pytest.approx(score, rel=0.02, abs=1e-3)


def test_in_a_full_fleet_a_tight_request_goes_to_tight_ones_though_they_are_fuller_and_a_loose_one_does_not() -> None:
    fleet = fleet_of([TIGHT_S] * 4, [LOOSE_S] * 12)
    assert fleet.replicas["load"][0] > fleet.replicas["load"][1]
    fleet.replicas["load"] = FULL_FROM
    assert np.argmax(score_replicas(fleet, asked(TIGHT_S)[0], 0.0, LEAST_ADDED)) == 0
    assert np.argmax(score_replicas(fleet, asked(LOOSE_S)[0], 0.0, LEAST_ADDED)) == 1


def test_while_there_is_room_tight_requests_spread() -> None:
    """Eight at once on two idle replicas: four each."""
    rows = np.concatenate([asked(TIGHT_S, request_id=10_000 + i) for i in range(8)])
    placements = np.zeros(8, dtype=PLACEMENT)
    place(fleet_of([], []), rows, 0.0, CandidateOrder(NO_SCORES, LEAST_ADDED, 4), placements)
    assert np.bincount(placements["replica"]).tolist() == [4, 4]


def test_base_time_counts_by_how_full_the_open_replicas_are() -> None:
    fleet, weights = fleet_of([LOOSE_S], [LOOSE_S], [LOOSE_S]), []
    for load in (0.0, ROOM_UNTIL, 0.5 * (ROOM_UNTIL + FULL_FROM), FULL_FROM, 2.0):
        fleet.replicas["load"] = load
        weights.append(base_weight(fleet))
    assert weights == pytest.approx([0.0, 0.0, 0.5, 1.0, 1.0])
    fleet.replicas["load"], fleet.replicas["is_open"][0] = [5.0, 0.0, 0.0], False
    assert base_weight(fleet) == 0.0


def test_of_equal_replicas_the_emptier_is_wanted_and_by_the_other_rule_the_fuller() -> None:
    fleet = fleet_of([LOOSE_S] * 10, [LOOSE_S] * 5)
    assert np.argmax(score_replicas(fleet, asked(LOOSE_S)[0], 0.0, LEAST_ADDED)) == 1
    np.testing.assert_array_equal(score_replicas(fleet, asked(LOOSE_S)[0], 0.0, MOST_LOADED), fleet.replicas["load"])
    fleet.replicas["is_open"][1] = False
    assert score_replicas(fleet, asked(LOOSE_S)[0], 0.0, LEAST_ADDED)[1] == -math.inf


def test_prompts_that_wait_count() -> None:
    fleet = fleet_of([LOOSE_S] * 5, [LOOSE_S] * 5)
    waiting = asked(LOOSE_S, 4000, 20_000)
    waiting["best_effort"] = True
    add_request(fleet, 0, waiting[0])
    assert np.argmax(score_replicas(fleet, asked(LOOSE_S)[0], 0.0, LEAST_ADDED)) == 1


def test_requests_of_one_burst_see_what_was_placed_before_them() -> None:
    """On three equal replicas as many each, where preferences taken once would send all to the first."""
    rows = np.concatenate([asked(LOOSE_S, request_id=10_000 + i) for i in range(6)])
    placements = np.zeros(6, dtype=PLACEMENT)
    for rule, counts in ((LEAST_ADDED, [7, 7, 7]), (MOST_LOADED, [11, 5, 5])):
        fleet = fleet_of(*[[LOOSE_S] * 5] * 3)
        place(fleet, rows, 0.0, CandidateOrder(NO_SCORES, rule, 4), placements)
        assert sorted(fleet.replicas["count"].tolist(), reverse=True) == counts
