"""Every registered routing policy keeps the same promises."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing.kernels import group_of
from routing.mirrors import POOL, REPLICA, SHARED
from routing.policy import Ask, idlest, make_routing, most_wanted, register, routing_names


@st.composite
def fleets(draw: st.DrawFn) -> np.ndarray:
    replicas = np.zeros(draw(st.integers(0, 8)), dtype=REPLICA)
    for replica in replicas:
        replica["is_open"], replica["tier"] = draw(st.booleans()), draw(st.integers(POOL, 3))
        replica["count"], replica["load"] = draw(st.integers(0, 40)), draw(st.floats(0, 2))
        replica["backlog_tokens"], replica["step_s"] = draw(st.floats(0, 1e5)), draw(st.floats(0, 1))
    return replicas


asks = st.builds(Ask, tier=st.integers(0, 3), prompt_tokens=st.integers(1, 4096))


@pytest.mark.parametrize("name", routing_names())
@given(ask=asks, fleet=fleets(), turn=st.integers(0, 1000), seed=st.integers(0, 5))
def test_contract(name: str, ask: Ask, fleet: np.ndarray, turn: int, seed: int) -> None:
    policy, before = make_routing(name), fleet.copy()
    wants = policy.prefer(ask, fleet, turn, np.random.default_rng(seed))
    np.testing.assert_array_equal(wants, policy.prefer(ask, fleet, turn, np.random.default_rng(seed)))
    assert (fleet == before).all(), "a policy only looks"
    assert len(wants) in (0, len(fleet))
    assert not np.isnan(wants).any()
    best = most_wanted(fleet, wants)
    assert (best >= 0) == bool(fleet["is_open"].any()), "an open replica is found whenever there is one"
    assert best < 0 or fleet["is_open"][best]


@given(fleet=fleets())
def test_best_effort_goes_to_the_shortest_backlog(fleet: np.ndarray) -> None:
    best = most_wanted(fleet, idlest(fleet))
    if best >= 0:
        assert fleet["backlog_tokens"][best] == fleet["backlog_tokens"][fleet["is_open"]].min()


def test_round_robin_takes_the_open_replicas_in_turn() -> None:
    fleet = np.zeros(4, dtype=REPLICA)
    fleet["is_open"] = [True, False, True, True]
    policy, rng = make_routing("round_robin"), np.random.default_rng(0)
    assert [most_wanted(fleet, policy.prefer(Ask(0, 1), fleet, turn, rng)) for turn in range(4)] == [0, 2, 3, 0]


def test_headroom_packs_until_full_and_then_spreads() -> None:
    fleet = np.zeros(3, dtype=REPLICA)
    fleet["is_open"] = True
    policy, rng = make_routing("predicted_headroom"), np.random.default_rng(0)
    for loads, chosen in (([0.2, 0.9, 1.1], 1), ([1.3, 1.1, 1.2], 1)):
        fleet["load"] = loads
        assert most_wanted(fleet, policy.prefer(Ask(0, 1), fleet, 0, rng)) == chosen


def test_unknown_and_duplicate_names() -> None:
    with pytest.raises(ValueError, match=r"round_robbin.*did you mean 'round_robin'"):
        make_routing("round_robbin")
    with pytest.raises(ValueError, match="twice"):
        register("sequential")(lambda: make_routing("sequential"))


def test_own_tier_then_shared_then_nearest_tighter_then_the_pool_and_never_looser() -> None:
    tiers = [0, 1, 2, SHARED, 3, POOL]
    groups = [group_of(tier, 2) for tier in tiers]
    assert sorted((g, t) for g, t in zip(groups, tiers, strict=True) if g >= 0) == [
        (0, 2), (1, SHARED), (2, 1), (3, 0), (group_of(POOL, 2), POOL),
    ]  # fmt: skip
    assert group_of(3, 2) < 0
