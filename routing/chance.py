"""How likely a newcomer's first token comes in time on one replica."""

import math

import numpy as np
from numba import njit

from planning.forecast.chance import DEVIATIONS, chance_in_time
from routing.fleet_state import formed_s


@njit(cache=True)
def first_token_chance(replica: np.void, limits: np.void, row: np.void, first_s: float, now_s: float) -> float:
    """Chance that the first token of a request (REQUEST[]), forecast for ``first_s``, comes by its TTFT.

    The further the mirror has moved on from what the replica told, the less is known of the iteration in flight. An
    engine with two in flight has told when it will form the next batch. 1 of a request without a TTFT, or with a token.
    """
    if row["ttft_s"] == math.inf or row["emitted_tokens"] > 0:
        return 1.0
    relative, told = DEVIATIONS * replica["error"], replica["formed"]
    known = min(told, limits["steps_in_flight"] - 1)
    one_s = relative * replica["flight_s"]
    deviations = (relative, one_s * math.sqrt(told), one_s * math.sqrt(told - known))
    own_s = first_s - max(now_s, replica["free_at_s"])
    spare_s = row["arrival_s"] + row["ttft_s"] - first_s
    return chance_in_time(spare_s, own_s, replica["flight_s"], formed_s(replica) - now_s, deviations)
