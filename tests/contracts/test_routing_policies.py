"""Every registered routing policy keeps the same promises."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing.policy import SHARED, Ask, Candidate, make_routing, register, routing_names

candidates = st.lists(
    st.builds(
        Candidate,
        index=st.just(0),
        tier=st.integers(SHARED, 3),
        requests=st.integers(0, 40),
        best_effort=st.just(0),
        kv_free_tokens=st.floats(-1e5, 1e5),
        backlog_tokens=st.floats(0, 1e5),
    ),
    max_size=8,
).map(lambda found: [Candidate(i, *list(vars(c).values())[1:]) for i, c in enumerate(found)])
asks = st.builds(Ask, tier=st.integers(0, 3), prompt_tokens=st.integers(1, 4096), best_effort=st.booleans())


@pytest.mark.parametrize("name", routing_names())
@given(ask=asks, fleet=candidates, turn=st.integers(0, 1000), seed=st.integers(0, 5))
def test_contract(name: str, ask: Ask, fleet: list[Candidate], turn: int, seed: int) -> None:
    policy = make_routing(name)
    order = policy.order(ask, fleet, turn, np.random.default_rng(seed))
    assert order == policy.order(ask, fleet, turn, np.random.default_rng(seed)), "same seed, same answer"
    assert len(set(order)) == len(order)
    assert set(order) <= {c.index for c in fleet}
    if policy.checks_admission and not ask.best_effort:
        assert all(fleet[i].tier <= ask.tier for i in order), "never a looser tier's replica"
    elif name != "power_of_two":
        assert len(order) == len(fleet)


def test_unknown_and_duplicate_names() -> None:
    with pytest.raises(ValueError, match=r"round_robbin.*did you mean 'round_robin'"):
        make_routing("round_robbin")
    with pytest.raises(ValueError, match="twice"):
        register("slo")(lambda: make_routing("slo"))


def test_own_tier_then_shared_then_nearest_tighter() -> None:
    fleet = [Candidate(i, tier, 0, 0, 0.0, 0.0) for i, tier in enumerate([0, 1, 2, SHARED, 3])]
    rng = np.random.default_rng(0)
    assert make_routing("slo").order(Ask(2, 10, False), fleet, 0, rng) == [2, 3, 1, 0]
