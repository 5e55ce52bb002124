"""Every registered routing policy keeps the same promises."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing.fleet_state import REPLICA_STATE, RESERVED, SHARED
from routing.placement import tier_distance
from routing.policies.unchecked import COPIES
from routing.policy import RoutingRequest, best_scored, idlest, make_routing, register, routing_names

PARTIAL = ("silos",)  # leave requests alone that others could serve


@st.composite
def fleets(draw: st.DrawFn) -> np.ndarray:
    replicas = np.zeros(draw(st.integers(0, 8)), dtype=REPLICA_STATE)
    for replica in replicas:
        replica["is_open"], replica["tier"] = draw(st.booleans()), draw(st.integers(RESERVED, 3))
        replica["count"], replica["load"] = draw(st.integers(0, 40)), draw(st.floats(0, 2))
        replica["backlog_tokens"], replica["step_s"] = draw(st.floats(0, 1e5)), draw(st.floats(0, 1))
        replica["prompt_token_s"] = draw(st.floats(0, 1e-3))
        replica["peak_tokens"], replica["usable_tokens"] = draw(st.floats(0, 1e6)), draw(st.floats(0, 1e6))
    return replicas


lengths = st.integers(1, 4096)
asks = st.builds(
    RoutingRequest, tier=st.integers(0, 3), prompt_tokens=lengths, output_tokens=lengths, best_effort=st.booleans()
)


@pytest.mark.parametrize("name", routing_names())
@given(request=asks, fleet=fleets(), turn=st.integers(0, 1000), seed=st.integers(0, 5))
def test_contract(name: str, request: RoutingRequest, fleet: np.ndarray, turn: int, seed: int) -> None:
    policy, before = make_routing(name), fleet.copy()
    scores = policy.score(request, fleet, turn, np.random.default_rng(seed))
    np.testing.assert_array_equal(scores, policy.score(request, fleet, turn, np.random.default_rng(seed)))
    assert (fleet == before).all(), "a policy only looks"
    assert len(scores) in (0, len(fleet))
    assert not np.isnan(scores).any()
    best = best_scored(fleet, scores if len(scores) else np.zeros(len(fleet)))  # none: its rule says them
    if name not in PARTIAL:
        assert (best >= 0) == bool(fleet["is_open"].any()), "an open replica is found whenever there is one"
    assert best < 0 or fleet["is_open"][best]


@given(fleet=fleets())
def test_best_effort_goes_to_the_shortest_backlog(fleet: np.ndarray) -> None:
    best = best_scored(fleet, idlest(fleet))
    if best >= 0:
        assert fleet["backlog_tokens"][best] == fleet["backlog_tokens"][fleet["is_open"]].min()


def test_round_robin_takes_the_open_replicas_in_turn() -> None:
    fleet = np.zeros(4, dtype=REPLICA_STATE)
    fleet["is_open"] = [True, False, True, True]
    policy, rng = make_routing("round_robin"), np.random.default_rng(0)
    assert [best_scored(fleet, policy.score(RoutingRequest(0, 1), fleet, turn, rng)) for turn in range(4)] == [
        0,
        2,
        3,
        0,
    ]


def test_headroom_packs_until_full_and_then_spreads() -> None:
    fleet = np.zeros(3, dtype=REPLICA_STATE)
    fleet["is_open"] = True
    policy, rng = make_routing("predicted_headroom"), np.random.default_rng(0)
    for loads, chosen in (([0.2, 0.9, 1.1], 1), ([1.3, 1.1, 1.2], 1)):
        fleet["load"] = loads
        assert best_scored(fleet, policy.score(RoutingRequest(0, 1), fleet, 0, rng)) == chosen


def test_unknown_and_duplicate_names() -> None:
    with pytest.raises(ValueError, match=r"round_robbin.*did you mean 'round_robin'"):
        make_routing("round_robbin")
    with pytest.raises(ValueError, match="twice"):
        register("sequential")(lambda: make_routing("sequential"))


def test_own_tier_then_shared_then_nearest_tighter_and_never_looser_or_reserved() -> None:
    tiers = [0, 1, 2, SHARED, 3, RESERVED]
    groups = {tier: tier_distance(tier, 2) for tier in tiers}
    assert sorted(tiers, key=lambda tier: groups[tier])[2:] == [2, SHARED, 1, 0]
    assert groups[3] < 0
    assert groups[RESERVED] < 0


def wanted(name: str, fleet: np.ndarray, request: RoutingRequest, seed: int = 0) -> list[float]:
    return make_routing(name).score(request, fleet, 0, np.random.default_rng(seed)).tolist()


def open_fleet(replicas: int, **fields: list[float]) -> np.ndarray:
    fleet = np.zeros(replicas, dtype=REPLICA_STATE)
    fleet["is_open"], fleet["tier"] = True, SHARED
    for name, values in fields.items():
        fleet[name] = values
    return fleet


def test_power_of_k_asks_k_replicas_and_takes_the_quickest() -> None:
    """K is less than the fleet; the quickest to have generated is not the one with the shortest iterations."""
    fleet = open_fleet(12, step_s=[0.02] * 12, prompt_token_s=[1e-4] * 12)
    drawn = [
        set(np.flatnonzero(np.isfinite(wanted("power_of_k", fleet, RoutingRequest(0, 100, 100), s)))) for s in range(20)
    ]
    assert {len(d) for d in drawn} == {COPIES}
    assert set.union(*drawn) == set(range(12)), "every replica has its turn"
    fleet = open_fleet(COPIES, step_s=[0.03] * COPIES, prompt_token_s=[1e-4] * COPIES)
    fleet["step_s"][:2], fleet["backlog_tokens"][1] = (0.02, 0.01), 50_000
    for output_tokens, best in ((100, 0), (1000, 1)):
        scores = wanted("power_of_k", fleet, RoutingRequest(0, 100, output_tokens))
        assert best_scored(fleet, np.array(scores)) == best
    assert wanted("power_of_k", fleet, RoutingRequest(0, 100, 100))[0] == pytest.approx(1 / (0.01 + 2.0))


def test_minimal_iteration_time_counts_prompts_that_wait() -> None:
    fleet = open_fleet(3, step_s=[0.02, 0.01, 0.01], prompt_token_s=[1e-4] * 3, backlog_tokens=[0.0, 150.0, 50.0])
    assert wanted("minimal_iteration_time", fleet, RoutingRequest(0, 1)) == pytest.approx([-0.02, -0.025, -0.015])


def test_remaining_memory_takes_the_largest_and_begins_a_new_round_when_none_is_left() -> None:
    fleet = open_fleet(3, usable_tokens=[1000.0, 1000.0, 4000.0], peak_tokens=[100.0, 600.0, 3300.0])
    assert wanted("remaining_memory", fleet, RoutingRequest(0, 100, 100)) == [900.0, 400.0, 700.0]
    assert wanted("remaining_memory", fleet, RoutingRequest(0, 100, 800)) == [900.0, 400.0, 700.0]
    assert wanted("remaining_memory", fleet, RoutingRequest(0, 100, 801)) == [1900.0, 1400.0, 4700.0]
    fleet["is_open"][2] = False
    fleet["peak_tokens"][2] = 0.0
    assert wanted("remaining_memory", fleet, RoutingRequest(0, 100, 801))[:2] == [1900.0, 1400.0], (
        "a closed one offers nothing"
    )


def test_silos_keep_to_themselves() -> None:
    fleet, shun = open_fleet(4, tier=[0, 1, SHARED, 1], count=[1, 2, 3, 4]), -np.inf
    assert wanted("silos", fleet, RoutingRequest(1, 10)) == [shun, -2.0, shun, -4.0]
    assert wanted("silos", fleet, RoutingRequest(2, 10)) == [shun, shun, -3.0, shun], (
        "no tier's replicas serve tiers without any"
    )
    fleet["is_open"][1::2] = False
    assert best_scored(fleet, np.array(wanted("silos", fleet, RoutingRequest(1, 10)))) < 0, (
        "a silo that is down is not replaced"
    )
    fleet["is_open"][2] = False
    assert wanted("silos", fleet, RoutingRequest(2, 10)) == [shun] * 4
    assert wanted("silos", fleet, RoutingRequest(2, 10, best_effort=True)) == [-1.0, -2.0, -3.0, -4.0]


def test_lmetric_multiplies_new_prompt_tokens_by_the_batch() -> None:
    """The third holds 900 of the 1,000 prompt tokens: they are not new there, however long it is presumed to hold."""
    fleet = open_fleet(3, backlog_tokens=[0.0, 500.0, 400.0], count=[2, 0, 1])
    assert wanted("lmetric", fleet, RoutingRequest(0, 1000)) == [-3000.0, -1500.0, -2800.0]
    held = np.array([0.0, 0.0, 900.0])
    assert wanted("lmetric", fleet, RoutingRequest(0, 1000, held_tokens=held)) == [-3000.0, -1500.0, -1000.0]
    assert make_routing("lmetric").counts_held, "no affinity comes on top"
