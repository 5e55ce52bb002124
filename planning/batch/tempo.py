"""Tempo's batch policy: largest service density first (LSDF), with cost-aware preemption in quanta."""

import math

import numpy as np
from numba import njit

from planning.batch.fair import FAIRNESS, QUANTUM_STEPS, at_boundary, blend
from planning.batch.kv import wanted_kv_tokens
from planning.batch.ordered import run_by_bid, sorted_rows
from planning.batch.policy import policy
from planning.batch.preemption import is_held
from planning.batch.worth import decode_step_s, first_s, prospects, recompute_s, service_gain
from planning.engine import EngineModel
from planning.tables import RequestTable

THRESHOLD = 0.1  # by which a priority must exceed that of the interrupted one (Concord D.5, 10 %)
RECOMPUTES = 2.0  # that an interruption costs: who takes the place may be interrupted in turn


@njit(cache=True)
def densities(
    engine: EngineModel, table: RequestTable, now_s: float, step_s: float, expected: tuple[np.ndarray, np.ndarray]
) -> np.ndarray:
    """Service gain per second of the time left (f8[rows], Tempo equation 4, with f as in its equation 2).

    ``expected`` is what ``planning.batch.worth.prospects`` says.
    """
    found, (rests, before) = np.empty(len(table)), expected
    for i in range(len(table)):
        next_s = first_s(engine, table[i], step_s)
        found[i] = service_gain(table[i], now_s, next_s, rests[i], before[i]) / rests[i]
    return found


@njit(cache=True)
def interruption_costs(
    engine: EngineModel, table: RequestTable, priorities: np.ndarray, rests: np.ndarray, quantum_steps: int
) -> np.ndarray:
    """The priority that a newcomer must exceed to take each request's place (f8[rows], Tempo section 4.2).

    By ``THRESHOLD``, and by what the recompute costs: while the engine computes a KV cache again, all that runs stands
    still. That loss is spread over the time for which the request is put off. A quantum under way is not interrupted,
    nor who has been and has made few tokens since: fairness would let the prompts of two tenants that do not both fit
    take each other's place for ever, chunk by chunk.
    """
    running = 0.0
    for i in range(len(table)):
        running += priorities[i] if table[i]["running"] else 0.0
    costs = np.full(len(table), math.inf)
    for i in range(len(table)):
        if at_boundary(table[i], quantum_steps) and not is_held(table[i]):
            loss = RECOMPUTES * recompute_s(engine, table[i]) * running / rests[i]
            costs[i] = (1.0 + THRESHOLD) * priorities[i] + loss
    return costs


@njit(cache=True)
def _reserve_places(engine: EngineModel, table: RequestTable, priorities: np.ndarray, costs: np.ndarray) -> None:
    """Put the first of those without objective, by arrival, before all others: their share of the batch's places and of
    the KV cache, one at least."""
    limits, top = engine.limits, math.inf
    share = limits["best_effort_share"]
    places = most = math.ceil(share * limits["max_running"]) if share > 0.0 else 0
    left = share * limits["kv_capacity_tokens"]
    for i in sorted_rows(np.zeros(len(table)), table):
        if places > 0 and table[i]["best_effort"]:
            left -= wanted_kv_tokens(table[i], limits["block_tokens"])
            if left < 0.0 and places < most:
                return
            priorities[i] = costs[i] = top
            places -= 1


@policy("tempo", remembers=True, options={"best_effort_share": 0.1, "fairness": FAIRNESS})
def form_largest_density_first(
    engine: EngineModel, table: RequestTable, now_s: float, tokens_out: np.ndarray
) -> tuple[float, np.ndarray]:
    """LSDF (Tempo algorithm 1), ``fairness`` blended in, ``best_effort_share`` of the places for best effort."""
    step_s = decode_step_s(engine, table)
    expected = prospects(engine, table, step_s)
    priorities = densities(engine, table, now_s, step_s, expected)
    costs = interruption_costs(engine, table, priorities, expected[0], QUANTUM_STEPS)
    blend(table, engine.limits["fairness"], priorities, costs)
    _reserve_places(engine, table, priorities, costs)
    return run_by_bid(engine, table, sorted_rows(-priorities, table), (priorities, costs), True, tokens_out)
