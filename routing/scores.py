"""A request's score for each replica from the replica's cached sums alone, at the time of placement. Kernels.

Three rules. ``MOST_LOADED`` makes the load gradient of PolyServe section 4.2, ``LEAST_LOADED`` its opposite: the most
room for what predictions miss. ``LEAST_ADDED`` puts the request where the
fleet's congestion, the sum of all squared loads, grows least: loads are kept even, and a request that is tighter than
all that a replica carries shortens every iteration there, which costs the more the more it carries. So tight requests
gather on replicas that are tight already, and pools that all tiers share come apart into tiers by themselves.

That saves the base time of iterations, which only a loaded fleet needs. While there is room, base time counts for
nothing: requests spread, and each engine has the most in hand for what nobody predicted.
"""

import math

import numpy as np
from numba import float64, njit

from planning.batch.kv import wanted_kv_tokens
from planning.batch.speculation import promised_step
from planning.deadlines import effective_tpot_s, num_uncomputed_tokens
from planning.engine import ENGINE_TYPE, EngineModel
from planning.tables import ROW_TYPE
from profiles.compiled_once import KernelTable, compiled_once
from routing.fleet_state import REPLICA_TYPE, SHORTEST_S, FleetState, decode_rest_s, engine_of, utilization

MOST_LOADED, LEAST_ADDED, LEAST_LOADED = range(3)  # positions in ``score_replica``
SCORE = float64(ENGINE_TYPE, REPLICA_TYPE, ROW_TYPE, float64, float64)
PROMPTS_DUE_S = 0.5  # prompt tokens that wait count as if they were due in so long
ROOM_UNTIL, FULL_FROM = 0.3, 0.5  # mean load of the open replicas: up to the first there is room, from the second none


@njit(cache=True)
def base_weight(fleet: FleetState) -> float:
    """How much the base time of iterations counts in ``LEAST_ADDED``: 0 while there is room, 1 in a full fleet."""
    load, count = 0.0, 0
    for r in range(len(fleet.replicas)):
        if fleet.replicas[r]["is_open"]:
            load, count = load + min(1.0, fleet.replicas[r]["load"]), count + 1
    return min(1.0, max(0.0, (load / max(1, count) - ROOM_UNTIL) / (FULL_FROM - ROOM_UNTIL)))


@compiled_once(SCORE)
def _most_loaded(engine: EngineModel, replica: np.void, row: np.void, now_s: float, weight: float) -> float:
    return float(replica["load"])


@compiled_once(SCORE)
def _least_loaded(engine: EngineModel, replica: np.void, row: np.void, now_s: float, weight: float) -> float:
    return -float(replica["load"])


@compiled_once(SCORE)
def _least_added(engine: EngineModel, replica: np.void, row: np.void, now_s: float, weight: float) -> float:
    prompt_share = replica["prompt_token_s"] / PROMPTS_DUE_S
    start_s = max(now_s, replica["free_at_s"])
    step_tokens, gain = promised_step(engine, row, start_s, replica["decodes"], replica["decode_kv_tokens"])
    own_s = max(SHORTEST_S, effective_tpot_s(row, start_s) * gain)
    before = _load(engine, replica, np.inf, (0.0, 0.0), 0, weight)
    before += replica["backlog_tokens"] * prompt_share
    todo = num_uncomputed_tokens(row)
    rates = (step_tokens / own_s, decode_rest_s(engine.coef, row) / own_s)
    after = _load(engine, replica, own_s, rates, wanted_kv_tokens(row, engine.limits["block_tokens"]), weight)
    after += (replica["backlog_tokens"] + todo) * prompt_share
    return float(before * before - after * after)


@njit(cache=True)
def _load(
    engine: EngineModel,
    replica: np.void,
    own_s: float,
    rates: tuple[float, float],
    kv_tokens: int,
    weight: float,
) -> float:
    """The replica's load with one more request of this pace, or without (inf), at the pace of the tightest
    (``routing.fleet_state.recompute_load``); of the base time of its iterations only the part ``weight``.

    ``rates``: what the request adds to ``token_rate`` and ``rest_rate``.
    """
    limits, is_more = engine.limits, own_s < np.inf
    step_s = max(SHORTEST_S, min(replica["pace_s"], own_s, limits["max_iteration_s"]))
    token_rate, rest_rate = replica["token_rate"] + rates[0], replica["rest_rate"] + rates[1]
    time_load = utilization(engine.coef, token_rate, rest_rate, step_s / max(weight, 1e-9))
    held = (replica["held_tokens"] + kv_tokens) / limits["kv_capacity_tokens"]
    sequences = (replica["count"] - replica["best_effort"] + is_more) / limits["max_running"]
    return float(max(time_load, held, sequences))


# ``score_replica(rule, engine, replica, row, now_s, weight)``: score of the replica (REPLICA_STATE) for the request
# (REQUEST) under a rule, with ``base_weight``; higher is better. A policy's own rule is what ``add`` returns.
score_replica = KernelTable("routing.scores", SCORE, [_most_loaded, _least_added, _least_loaded])


@njit(cache=True)
def score_replicas(fleet: FleetState, row: np.void, now_s: float, rule: int) -> np.ndarray:
    """``score_replica`` for every open replica (f8[R]); -inf for the others."""
    scores, weight = np.full(len(fleet.replicas), -math.inf), base_weight(fleet)
    for r in range(len(scores)):
        if fleet.replicas[r]["is_open"]:
            scores[r] = score_replica(rule, engine_of(fleet, r), fleet.replicas[r], row, now_s, weight)
    return scores
