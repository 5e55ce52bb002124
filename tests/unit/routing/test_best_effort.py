"""Where best effort goes, against the same said with arrays."""

import numpy as np
import pytest

from routing.best_effort import best_effort_places, idlest_open
from routing.fleet_state import FleetState, make_fleet_state
from routing.placement import NOWHERE
from routing.policy import best_scored, idlest

EVERY = np.zeros(0)  # no held tokens, or no scores


def fleet(seed: int, replicas: int = 12) -> FleetState:
    """Replicas of few different figures, so that there are ties."""
    rng, state = np.random.default_rng(seed), make_fleet_state(replicas, 4)
    state.replicas["is_open"] = rng.random(replicas) < 0.8
    state.replicas["backlog_tokens"] = rng.integers(0, 3, replicas)
    for name in ("count", "tier", "best_effort"):
        state.replicas[name] = rng.integers(0, 3, replicas)
    state.limits["max_running"] = rng.integers(1, 4, replicas)
    return state


@pytest.mark.parametrize("seed", range(30))
def test_the_idlest_is_that_of_all_in_order(seed: int) -> None:
    state, rng = fleet(seed), np.random.default_rng(seed)
    held, scores = rng.integers(0, 3, 12).astype(float), np.where(rng.random(12) < 0.7, 0.0, -np.inf)
    usable = rng.random(12) < 0.7
    for own_held, own_scores in ((EVERY, EVERY), (held, EVERY), (EVERY, scores), (held, scores)):
        wanted = np.where(usable, idlest(state.replicas, own_held), -np.inf)
        if len(own_scores):
            wanted[own_scores == -np.inf] = -np.inf
        assert idlest_open(state, own_held, own_scores, usable) == best_scored(state.replicas, wanted)
    assert idlest_open(state, EVERY, EVERY, np.zeros(12, dtype=np.bool_)) == NOWHERE


@pytest.mark.parametrize("seed", range(5))
def test_places_are_what_the_backlog_leaves_on_open_replicas(seed: int) -> None:
    state = fleet(seed)
    most = np.ceil(0.6 * state.limits["max_running"])
    left = np.where(state.replicas["is_open"], np.maximum(most - state.replicas["best_effort"], 0), 0)
    assert best_effort_places(state, 0.6).tolist() == left.tolist()
