"""What cached sums say about a request, against forecasts."""

import math

from hypothesis import given
from hypothesis import strategies as st

from planning.admission.search import ADMITTED, KV_FULL
from planning.engine import EngineModel
from profiles.kernels import iteration_s
from routing.fleet_state import add_request, recompute_load
from routing.placement import check_replica
from routing.quick_check import quick_check
from tests.support.examples import examples
from tests.support.planning_cases import COEFS
from tests.unit.routing.test_placement import fleet_of, new


@examples(150)
@given(
    st.integers(1, 40_000),
    st.floats(0.05, 5.0) | st.just(math.inf),
    st.floats(1.01, 3.0) | st.just(math.inf),
    st.floats(0.5, 30.0) | st.just(math.inf),
    st.integers(2, 500),
    st.sampled_from([0.0, 0.5, 0.9]),
)
def test_the_quick_check_denies_an_idle_replica_nothing_that_a_forecast_grants(
    prompt_tokens: int, ttft_s: float, slower: float, deadline_s: float, output_tokens: int, acceptance: float
) -> None:
    """Also of a pace that leaves an iteration hardly time for a prompt: until its first token it binds nobody."""
    fleet, asked = fleet_of([0]), new()
    fleet.limits["drafts"], fleet.limits["acceptance"] = 4, acceptance
    pace_s = (0.6 if acceptance else 1.0) * slower * iteration_s(COEFS[0], 1.0, 0.0, 0.0, 1.0, 0.0)
    asked["prompt_tokens"], asked["ttft_s"], asked["tpot_s"] = prompt_tokens, ttft_s, pace_s
    asked["deadline_s"] = deadline_s
    asked["output_tokens"] = asked["output_cap_tokens"] = output_tokens
    if check_replica(fleet, 0, asked[0], 0.0) == ADMITTED:
        engine = EngineModel(fleet.pessimistic_coefs[0], fleet.limits[0])
        assert quick_check(engine, fleet.replicas[0], asked[0], 0.0) == ADMITTED


def test_the_quick_check_knows_the_kv_cache_to_the_token() -> None:
    fleet, asked = fleet_of([0]), new()
    asked["prompt_tokens"], asked["ttft_s"] = 3000, 30.0
    for capacity, reason in ((3000, ADMITTED), (2999, KV_FULL)):
        fleet.limits["kv_capacity_tokens"] = capacity
        recompute_load(fleet, 0)
        assert quick_check(EngineModel(fleet.coefs[0], fleet.limits[0]), fleet.replicas[0], asked[0], 0.0) == reason


def test_what_a_prefix_cache_holds_of_a_prompt_takes_room_as_well() -> None:
    fleet, waits, asked = fleet_of([0]), new(), new()
    fleet.limits["kv_capacity_tokens"] = 3000
    for row, prompt_tokens, cached_tokens in ((waits, 2000, 1900), (asked, 1000, 900)):
        row["prompt_tokens"], row["computed_tokens"], row["ttft_s"] = prompt_tokens, cached_tokens, 30.0
    add_request(fleet, 0, waits[0])
    assert fleet.replicas[0]["held_tokens"] == 2000
    for more, reason in ((0, ADMITTED), (1, KV_FULL)):
        asked["prompt_tokens"] += more
        assert quick_check(EngineModel(fleet.coefs[0], fleet.limits[0]), fleet.replicas[0], asked[0], 0.0) == reason


def test_a_request_past_its_deadline_closes_its_replica_to_nobody() -> None:
    fleet, asked = fleet_of([1]), new()
    load = fleet.replicas[0]["load"]
    engine = EngineModel(fleet.pessimistic_coefs[0], fleet.limits[0])
    for left_s in (0.001, -0.5):
        fleet.tables[0, 0]["deadline_s"] = fleet.replicas[0]["free_at_s"] + left_s
        recompute_load(fleet, 0)
        assert fleet.replicas[0]["load"] <= load
        assert quick_check(engine, fleet.replicas[0], asked[0], 0.0) == ADMITTED
