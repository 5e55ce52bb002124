"""Which slots take requests, against the same said with arrays."""

import numpy as np
import pytest

from controller.mirror.slots import DOUBT_S, LIVENESS, PUNCTUAL, ReplicaSlots


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
