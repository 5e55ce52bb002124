"""What an idle fleet could do: the one replica that is forecast exactly is the one that matters."""

import math

import numpy as np
import pytest

from planning.admission.search import ADMITTED
from planning.limits import make_limits
from routing.fleet_state import RESERVED, FleetState
from routing.idle import at_best, best_idle, latest_start_s
from routing.placement import NOWHERE
from tests.unit.routing.test_placement import fleet_of, new

UNBOUND_S = 30.0


def mixed_fleet(seed: int, replicas: int = 12) -> FleetState:
    """Replicas with coefficients, KV caches and batch limits of their own."""
    rng, fleet = np.random.default_rng(seed), fleet_of([0] * replicas)
    fleet.pessimistic_coefs[:] *= rng.uniform(0.5, 2.0, (replicas, 1))
    for r in range(replicas):
        fleet.limits[r] = make_limits(int(rng.choice([4_000, 400_000])), max_batch_tokens=int(rng.choice([512, 8192])))
    return fleet


def request(seed: int) -> np.void:
    rng, row = np.random.default_rng(seed), new()[0]
    row["prompt_tokens"], row["output_tokens"] = rng.integers(50, 6000), rng.integers(1, 500)
    row["output_cap_tokens"] = 1000
    row["ttft_s"], row["tpot_s"] = rng.choice([0.02, 0.2, 1.0, np.inf]), rng.choice([0.01, 0.05, np.inf])
    row["deadline_s"] = row["arrival_s"] + rng.choice([3.0, 20.0, np.inf])
    return row


def one_by_one(fleet: FleetState, row: np.void) -> list[float]:
    """The latest start on each replica, asked by itself."""
    told, is_open = [], fleet.replicas["is_open"].copy()
    for r in range(len(fleet.replicas)):
        fleet.replicas["is_open"] = False
        fleet.replicas["is_open"][r] = is_open[r]
        told.append(latest_start_s(fleet, row, 0.0, UNBOUND_S))
    fleet.replicas["is_open"] = is_open
    return told


@pytest.mark.parametrize("seed", range(30))
def test_it_is_the_latest_start_of_all_replicas(seed: int) -> None:
    fleet, row = mixed_fleet(seed), request(seed)
    best = max(one_by_one(fleet, row))
    told = latest_start_s(fleet, row, 0.0, UNBOUND_S)
    assert told <= best
    assert told == best or told >= best - 0.02 * (abs(best) + 1.0), "the closed form ranks them nearly as they are"
    assert (at_best(fleet, row, 0.0)[0] == ADMITTED) == (best > -math.inf)


def test_only_replicas_that_it_may_join_count() -> None:
    fleet, row = mixed_fleet(1, 3), request(1)
    fleet.replicas["tier"] = RESERVED
    assert best_idle(fleet, row, 0.0, False) == NOWHERE
    assert latest_start_s(fleet, row, 0.0, UNBOUND_S) == -math.inf
    assert best_idle(fleet, row, 0.0, True) != NOWHERE
    fleet.replicas["is_open"] = False
    assert best_idle(fleet, row, 0.0, True) == NOWHERE
