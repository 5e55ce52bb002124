"""Which slots take requests, against the same said with arrays."""

import numpy as np
import pytest

from controller.mirror.slots import DOUBT_S, LIVENESS, PUNCTUAL, ReplicaSlots
from planning.limits import make_limits
from planning.tables import REQUEST
from routing.fleet_state import advance_fleet
from tests.support.simulation_cases import a100


def slots(seed: int) -> ReplicaSlots:
    rng, made = np.random.default_rng(seed), ReplicaSlots(8)
    made.liveness = np.zeros(8, dtype=LIVENESS)
    for name, share in (("is_used", 0.8), ("draining", 0.3), ("is_stuck", 0.2 + 0.2 * (seed % 4))):
        made.liveness[name] = rng.random(8) < share
    made.liveness["seen_s"], made.liveness["moved_s"] = rng.uniform(0.0, 10.0, 8), rng.uniform(0.0, 10.0, 8)
    made.liveness["suspect_s"] = np.where(rng.random(8) < 0.3, rng.uniform(0.0, 10.0, 8), -np.inf)
    return made


@pytest.mark.parametrize("seed", range(40))
def test_open_are_those_that_move_else_those_that_live_else_those_heard_at_all(seed: int) -> None:
    made, closed = slots(seed), [seed % 8] if seed % 2 else []
    told, silent_s = made.liveness, 1.0 + seed % 5

    def live(within_s: float) -> np.ndarray:
        heard = told["is_used"] & (10.0 - told["seen_s"] <= within_s)
        return heard & (told["moved_s"] - told["suspect_s"] > DOUBT_S)

    usable = told["is_used"] & ~told["draining"]
    usable[closed] = False
    choices = usable & live(silent_s) & ~told["is_stuck"], usable & live(silent_s), usable & live(9.0)
    wanted = next((each for each in choices if each.any()), choices[-1])
    assert made.usable(closed, 10.0, silent_s, 9.0).tolist() == wanted.tolist()
    assert made.are_live(10.0, silent_s).tolist() == live(silent_s).tolist()
    silence_s = np.where(told["suspect_s"] > told["seen_s"], min(4.0, 2.0 * silent_s), 4.0)
    gone = np.flatnonzero(told["is_used"] & (told["seen_s"] < 10.0 - silence_s))
    assert made.gone(10.0, silent_s, 4.0) == gone.tolist()


def test_mirrors_of_a_large_fleet_may_lag() -> None:
    made = ReplicaSlots(4)
    for _ in range(PUNCTUAL):
        made.take()
    assert made.lag_s == 0.0
    made.take()
    assert made.lag_s > 0.0


def test_those_held_are_the_last_of_their_table_whoever_joins_later() -> None:
    made, slot = with_one_slot()
    for uid in (1, 2, 3):
        made.add(slot, row_of(uid))
    made.fleet_state.forecasts[slot]["first_s"][:3] = [0.1, 0.2, 0.3]
    made.hold(slot, 2)
    assert made.rows(slot)["id"].tolist() == [1, 3, 2]
    assert made.fleet_state.forecasts[slot]["first_s"][:3].tolist() == [0.1, 0.3, 0.2]
    made.add(slot, row_of(4))
    assert made.rows(slot)["id"].tolist() == [1, 3, 4, 2]
    assert np.isinf(made.rows(slot)["joined_s"]).tolist() == [False, False, False, True]
    made.put(slot, made.rows(slot)[[3, 0, 2]])
    assert made.rows(slot)["id"].tolist() == [1, 4, 2]


def test_a_mirror_does_not_run_those_that_are_held() -> None:
    made, slot = with_one_slot()
    for uid in (1, 2):
        made.add(slot, row_of(uid))
    made.hold(slot, 2)
    advance_fleet(made.fleet_state, 0.05)
    assert made.rows(slot)["running"].tolist() == [True, False]
    made.remove(slot, 1)
    free_s = float(made.fleet_state.replicas["free_at_s"][slot])
    advance_fleet(made.fleet_state, free_s + 0.05)
    assert made.rows(slot)["running"].tolist() == [False]
    assert made.fleet_state.replicas["free_at_s"][slot] == free_s + 0.05, "idle"


def with_one_slot() -> tuple[ReplicaSlots, int]:
    made = ReplicaSlots(1, 4)
    slot = made.take()
    made.fleet_state.limits[slot], made.fleet_state.replicas["is_open"][slot] = make_limits(100_000), True
    made.fleet_state.coefs[slot] = made.fleet_state.pessimistic_coefs[slot] = a100().coefficients
    return made, slot


def row_of(uid: int) -> np.ndarray:
    row = np.zeros((), dtype=REQUEST)
    row["id"], row["prompt_tokens"], row["output_tokens"], row["output_cap_tokens"] = uid, 500, 100, 200
    row["ttft_s"], row["tpot_s"], row["deadline_s"] = 1.0, 0.1, np.inf
    return row
