"""How likely a newcomer's first token comes in time on one replica."""

import math

import numpy as np
from numba import njit

from planning.forecast.chance import DEVIATIONS, chance_in_time
from routing.fleet_state import FleetState, formed_s


@njit(cache=True)
def first_token_chance(replica: np.void, limits: np.void, row: np.void, first_s: float, now_s: float) -> float:
    """Chance that the first token of a request (REQUEST[]), forecast for ``first_s``, comes by its TTFT.

    The further the mirror has moved on from what the replica told, the less is known of the iteration in flight. An
    engine with two in flight has told when it forms the next batch. Forecasts are slower by the mean error than what
    is expected. 1 of a request without a TTFT, or with a token.
    """
    if row["ttft_s"] == math.inf or row["emitted_tokens"] > 0:
        return 1.0
    error, flight_s, told = replica["error"], replica["flight_s"], replica["formed"]
    known = min(told, limits["steps_in_flight"] - 1)
    relative, own_s = DEVIATIONS * error, (first_s - max(now_s, replica["free_at_s"])) / (1.0 + error)
    spare_s = row["arrival_s"] + row["ttft_s"] - first_s + error * own_s
    variance = own_s * min(own_s, limits["max_iteration_s"]) + known * flight_s * flight_s
    deviation_s = relative * math.sqrt(max(0.0, variance))
    return chance_in_time(spare_s, deviation_s, formed_s(replica) - now_s, flight_s, told - known, relative)


@njit(cache=True)
def is_likely(fleet: FleetState, r: int, row: np.void, chance: float) -> bool:
    """Whether that is as much as the row asks for. On an idle engine it may be any: waiting makes it no surer."""
    is_idle = fleet.replicas[r]["count"] == 0 or fleet.tables[r, 0]["joined_s"] == math.inf  # all are held
    return chance >= row["least_chance"] or is_idle
