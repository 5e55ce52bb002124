"""How sure a replica is of a first token, and promises that ask for it."""

import math

import numpy as np
import pytest

from planning.admission.search import ADMITTED, TTFT
from planning.limits import make_limits
from routing.chance import first_token_chance, is_likely
from routing.fleet_state import (
    FleetState,
    add_request,
    advance_replica,
    hold_request,
    make_fleet_state,
    recompute_load,
)
from routing.placement import NO_SCORES, PLACEMENT, CandidateOrder, check_replica, place
from routing.scores import MOST_LOADED
from tests.support.planning_cases import COEFS, draw_requests, start_decoding

DECODES, TTFT_S = 100, 0.026  # an iteration of them takes 13 ms, one with the newcomer as well 14
SYNCHRONOUS = make_limits(400_000)
FORMS_LATE = make_limits(400_000, steps_in_flight=2, lead_s=0.003, lead_share=0.1)


def busy(error: float = 0.2, limits: np.void = SYNCHRONOUS) -> FleetState:
    """A replica that is free at 0 and decodes."""
    rng, fleet = np.random.default_rng(0), make_fleet_state(1, DECODES + 20)
    fleet.coefs[:], fleet.pessimistic_coefs[:], fleet.limits[:] = COEFS[0], COEFS[0], limits
    fleet.replicas["is_open"], fleet.replicas["error"], fleet.replicas["tier"] = True, error, -1
    rows = draw_requests(rng, DECODES, 1)
    start_decoding(rng, rows)
    rows["ttft_s"], rows["tpot_s"], rows["deadline_s"], rows["arrival_s"] = 60.0, 0.2, math.inf, 0.0
    for row in rows:
        add_request(fleet, 0, row)
    return fleet


def newcomer(arrival_s: float, least_chance: float = 0.0) -> np.ndarray:
    rows = draw_requests(np.random.default_rng(1), 1, 1000)
    rows["arrival_s"], rows["ttft_s"], rows["tpot_s"], rows["deadline_s"] = arrival_s, TTFT_S, 0.2, math.inf
    rows["prompt_tokens"], rows["least_chance"] = 100, least_chance
    return rows


def placed(fleet: FleetState, now_s: float, least_chance: float = 0.0) -> np.void:
    placements = np.zeros(1, dtype=PLACEMENT)
    place(fleet, newcomer(now_s, least_chance), now_s, CandidateOrder(NO_SCORES, MOST_LOADED, 1), placements)
    found: np.void = placements[0]
    return found


def flown(fleet: FleetState) -> float:
    """It has begun an iteration at 0; how long that takes."""
    advance_replica(fleet, 0, 1e-6)
    return float(fleet.replicas[0]["flight_s"])


def test_a_mirror_knows_the_iteration_in_flight_and_how_many_there_were_since_one_was_told() -> None:
    fleet = busy()
    flight_s = flown(fleet)
    assert flight_s == pytest.approx(fleet.replicas[0]["free_at_s"])
    assert fleet.replicas[0]["formed"] == 1
    advance_replica(fleet, 0, 2.5 * flight_s)
    assert fleet.replicas[0]["formed"] == 3
    empty = make_fleet_state(1, 4)
    empty.coefs[:], empty.limits[:] = COEFS[0], make_limits(1000)
    advance_replica(empty, 0, 1.0)
    assert (empty.replicas[0]["formed"], empty.replicas[0]["flight_s"]) == (0, 0.0)


def test_the_nearer_the_end_of_the_iteration_in_flight_the_less_sure_it_is() -> None:
    fleet = busy()
    flight_s = flown(fleet)
    early, late = placed(busy_again(fleet), 0.6 * flight_s), placed(busy_again(fleet), 0.98 * flight_s)
    assert early["first_s"] - 0.6 * flight_s > late["first_s"] - 0.98 * flight_s, "it is expected sooner"
    assert late["chance"] < early["chance"] - 0.05


def busy_again(fleet: FleetState) -> FleetState:
    """A copy."""
    return FleetState(*(each.copy() for each in fleet))


def test_no_promise_is_made_that_is_less_sure_than_asked_for() -> None:
    fleet = busy()
    now_s = 0.98 * flown(fleet)
    chance = float(placed(busy_again(fleet), now_s)["chance"])
    assert 0.5 < chance < 0.9
    assert check_replica(fleet, 0, newcomer(now_s, chance - 0.01)[0], now_s) == ADMITTED
    assert check_replica(fleet, 0, newcomer(now_s, chance + 0.01)[0], now_s) == TTFT


def test_an_exact_engine_and_one_that_has_told_when_it_forms_the_next_batch_leave_less_doubt() -> None:
    exact, sync, late = busy(0.0), busy(), busy(limits=FORMS_LATE)
    chances = []
    for fleet in (exact, sync, late):
        now_s = 0.98 * flown(fleet) - fleet.replicas[0]["ahead_s"]
        chances.append(float(placed(fleet, now_s)["chance"]))
    assert chances[0] == 1.0
    assert chances[1] < chances[2] < 1.0


@pytest.mark.parametrize(("field", "value"), [("ttft_s", math.inf), ("emitted_tokens", 3)])
def test_who_has_no_first_token_to_come_in_time_asks_for_nothing(field: str, value: float) -> None:
    fleet, row = busy(), newcomer(0.0)
    flown(fleet)
    row[field] = value
    assert first_token_chance(fleet.replicas[0], fleet.limits[0], row[0], 1.0, 0.0) == 1.0


def test_on_an_idle_engine_a_doubtful_promise_is_made_all_the_same() -> None:
    """Waiting makes it no surer, and nothing would ever be learnt of it."""
    fleet = make_fleet_state(1, 4)
    fleet.coefs[:], fleet.pessimistic_coefs[:], fleet.limits[:] = COEFS[0], COEFS[0], SYNCHRONOUS
    fleet.replicas["is_open"], fleet.replicas["error"], fleet.replicas["tier"] = True, 0.3, -1
    recompute_load(fleet, 0)
    row = newcomer(0.0, 0.99)
    row["prompt_tokens"], row["ttft_s"] = 2000, 1.0
    alone_s = float(placed_as(fleet, row)["first_s"])
    row["ttft_s"] = 1.01 * alone_s
    found = placed_as(fleet, row)
    assert found["replica"] == 0
    assert 0.5 < found["chance"] < 0.99


def test_an_engine_is_idle_whose_requests_are_all_held_elsewhere() -> None:
    fleet, row = busy(), newcomer(0.0, 0.9)
    assert not is_likely(fleet, 0, row[0], 0.8)
    for request_id in fleet.tables[0, :DECODES]["id"].tolist():
        hold_request(fleet, 0, request_id)
    assert is_likely(fleet, 0, row[0], 0.8)


def placed_as(fleet: FleetState, row: np.ndarray) -> np.void:
    """Where this newcomer would be placed at 0."""
    placements = np.zeros(1, dtype=PLACEMENT)
    place(busy_again(fleet), row.copy(), 0.0, CandidateOrder(NO_SCORES, MOST_LOADED, 1), placements)
    found: np.void = placements[0]
    return found
