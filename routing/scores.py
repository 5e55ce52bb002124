"""A request's score for each replica from the replica's cached sums alone, at the time of placement. Kernels.

Two rules. ``MOST_LOADED`` makes the load gradient of PolyServe section 4.2. ``LEAST_ADDED`` puts the request where the
fleet's congestion, the sum of all squared loads, grows least: loads are kept even, and a request that is tighter than
all that a replica carries shortens every iteration there, which costs the more the more it carries. So tight requests
gather on replicas that are tight already, and pools that all tiers share come apart into tiers by themselves.
"""

import math

import numpy as np
from numba import njit

from planning.deadlines import effective_tpot_s, num_uncomputed_tokens
from profiles.kernels import Coefficients
from routing.fleet_state import SHORTEST_S, FleetState, decode_rest_s, utilization

MOST_LOADED, LEAST_ADDED = range(2)
PROMPTS_DUE_S = 0.5  # prompt tokens that wait count as if they were due in so long


@njit(cache=True)
def score_replica(
    coef: Coefficients, limits: np.void, replica: np.void, row: np.void, now_s: float, rule: int
) -> float:
    """Score of the replica (REPLICA_STATE) for the request (REQUEST) under ``rule``; higher is better."""
    if rule == MOST_LOADED:
        return float(replica["load"])
    prompt_share = replica["prompt_token_s"] / PROMPTS_DUE_S
    before = replica["load"] + replica["backlog_tokens"] * prompt_share
    after = _load_with(coef, limits, replica, row, now_s)
    after += (replica["backlog_tokens"] + num_uncomputed_tokens(row)) * prompt_share
    return float(before * before - after * after)


@njit(cache=True)
def _load_with(coef: Coefficients, limits: np.void, replica: np.void, row: np.void, now_s: float) -> float:
    """The replica's load once it decodes the request too, at the pace of the tightest
    (``routing.fleet_state.recompute_load``)."""
    own_s = max(SHORTEST_S, effective_tpot_s(row, max(now_s, replica["free_at_s"])))
    step_s = max(SHORTEST_S, min(replica["pace_s"], own_s, limits["max_iteration_s"]))
    token_rate = replica["token_rate"] + 1.0 / own_s
    rest_rate = replica["rest_rate"] + decode_rest_s(coef, row) / own_s
    held = (replica["held_tokens"] + num_uncomputed_tokens(row)) / limits["kv_capacity_tokens"]
    sequences = (replica["count"] - replica["best_effort"] + 1) / limits["max_running"]
    return float(max(utilization(coef, token_rate, rest_rate, step_s), held, sequences))


@njit(cache=True)
def score_replicas(fleet: FleetState, row: np.void, now_s: float, rule: int) -> np.ndarray:
    """``score_replica`` for every open replica (f8[R]); -inf for the others."""
    scores = np.full(len(fleet.replicas), -math.inf)
    for r in range(len(scores)):
        if fleet.replicas[r]["is_open"]:
            scores[r] = score_replica(fleet.pessimistic_coefs[r], fleet.limits[r], fleet.replicas[r], row, now_s, rule)
    return scores
