"""The two halves of a request that is prefilled and decoded on different replicas."""

import numpy as np
import pytest

from controller.disaggregation.split import decode_slot, prefill_part, prefill_slo
from planning.deadlines import rate_due_s
from planning.limits import make_limits
from protocol.messages import INF, AdmissionRequest, Slo
from routing.fleet_state import FleetState, make_fleet_state, recompute_load
from routing.placement import NOWHERE
from tests.support.planning_cases import COEFS, draw_requests, start_decoding


def test_the_prefill_keeps_its_ttft_and_has_no_pace() -> None:
    slo = prefill_slo(Slo(0.5, 0.05, tier="standard", max_wait_s=9.0), 1000, 100)
    assert slo == Slo(0.5, INF, INF, "standard", max_wait_s=9.0)


def test_of_a_deadline_it_gets_the_share_of_its_work() -> None:
    """As the planner spreads the deadline of a request that stays where it is."""
    rng = np.random.default_rng(0)
    for row in draw_requests(rng, 50, 1):
        row["emitted_tokens"] = row["computed_tokens"] = 0
        row["arrival_s"], row["ttft_s"], row["deadline_s"] = 0.0, np.inf, rng.uniform(1.0, 60.0)
        slo = prefill_slo(Slo(e2e_s=float(row["deadline_s"])), int(row["prompt_tokens"]), int(row["output_tokens"]))
        assert slo.ttft_s == pytest.approx(rate_due_s(row, 0.0))
        assert slo.e2e_s == INF


def test_the_tighter_of_ttft_and_deadline_counts() -> None:
    assert prefill_slo(Slo(0.5, e2e_s=60.0), 100, 50).ttft_s == 0.5
    assert prefill_slo(Slo(30.0, e2e_s=60.0), 100, 1000).ttft_s < 1.0


def test_its_question_is_about_one_token() -> None:
    part = prefill_part(AdmissionRequest("x", 1000, 300, Slo(0.5, 0.05)), 120)
    assert (part.max_tokens, part.slo.tpot_s, part.prompt_tokens) == (1, INF, 1000)


def fleet_state(loads: list[int], capacity_tokens: int = 100_000) -> FleetState:
    rng, fleet = np.random.default_rng(3), make_fleet_state(len(loads), 400)
    fleet.coefs[:], fleet.pessimistic_coefs[:], fleet.limits[:] = COEFS[0], COEFS[0], make_limits(capacity_tokens)
    for r, load in enumerate(loads):
        table = draw_requests(rng, load, 1000 * r + 1)
        start_decoding(rng, table)
        table["ttft_s"], table["tpot_s"], table["deadline_s"], table["tier"] = 0.5, 0.03, np.inf, 0
        table["arrival_s"] = 0.02 - table["ttft_s"] - table["emitted_tokens"] * table["tpot_s"]
        fleet.replicas["count"][r], fleet.tables[r, :load] = load, table
        recompute_load(fleet, r)
    return fleet


def newcomer(prompt_tokens: int = 500, tier: int = 0) -> np.ndarray:
    row = draw_requests(np.random.default_rng(5), 1, 99_000)
    row["emitted_tokens"] = row["computed_tokens"] = row["arrival_s"] = 0
    row["ttft_s"], row["tpot_s"], row["deadline_s"], row["tier"] = 0.5, 0.03, np.inf, tier
    row["prompt_tokens"] = prompt_tokens
    return row[0]


def test_the_first_replica_with_room_is_found() -> None:
    fleet = fleet_state([390, 5, 5])
    assert decode_slot(fleet, [0, 1, 2], [], newcomer(), 0.0) == 1
    assert decode_slot(fleet, [0], [], newcomer(), 0.0) == NOWHERE
    assert decode_slot(fleet, [], [], newcomer(), 0.0) == NOWHERE


def test_its_whole_kv_cache_must_fit() -> None:
    fleet = fleet_state([0], capacity_tokens=1024)
    assert decode_slot(fleet, [0], [], newcomer(1000), 0.0) == 0
    assert decode_slot(fleet, [0], [], newcomer(1100), 0.0) == NOWHERE


def test_its_own_tier_goes_first_and_a_looser_ones_replica_only_counts_if_it_may_join() -> None:
    fleet = fleet_state([0, 0, 0])
    fleet.replicas["tier"] = (3, 1, 2)
    assert decode_slot(fleet, [0, 1, 2], [], newcomer(tier=2), 0.0) == 2
    assert decode_slot(fleet, [0], [], newcomer(tier=2), 0.0) == NOWHERE
    assert decode_slot(fleet, [0], [0], newcomer(tier=2), 0.0) == 0
