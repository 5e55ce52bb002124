"""Chance in simulated engines: numbers that depend on a seed and on what they are for, the same for every system."""

import math

import numpy as np
from numba import njit

from planning.splitmix import GAMMA, mixed
from profiles.spread import stray_factor


@njit(cache=True)
def chance(seed: int, request: int, token: int) -> float:
    """A number in [0, 1) that depends on nothing but its arguments (splitmix64)."""
    bits = np.uint64(seed) * GAMMA + np.uint64(request) * np.uint64(0xD1B54A32D192ED03)
    bits += np.uint64(token + 1) * np.uint64(0x8CB92BA72F3D8DD7)
    return float(mixed(bits) >> np.uint64(11)) / 9007199254740992.0


@njit(cache=True)
def next_noise(engine: np.void, logs: np.ndarray, seed: int, r: int) -> float:
    """How many times as long as the model says the next iteration of replica ``r`` (ENGINE[]) takes.

    Lognormal of mean 1, by Box and Muller, or else by a profile's spread (``logs`` of ``profiles.spread``, of this kind
    of batch). The deviate behind it is an autoregressive process.
    """
    if engine["sigma"] == 0.0 and not engine["strays"]:
        return 1.0
    radius = math.sqrt(-2.0 * math.log(1.0 - chance(seed, -1 - r, 2 * engine["iterations"])))
    normal = radius * math.cos(2.0 * math.pi * chance(seed, -1 - r, 2 * engine["iterations"] + 1))
    kept = engine["correlation"]
    engine["deviation"] = kept * engine["deviation"] + math.sqrt(1.0 - kept * kept) * normal
    if engine["sigma"] == 0.0:
        return stray_factor(logs, engine["deviation"])
    return math.exp(engine["sigma"] * engine["deviation"] - 0.5 * engine["sigma"] ** 2)
