"""Batch policies by service received, which engines remember (``planning.batch.memory``): VTC and Autellix's PLAS.

Also the fairness that Tempo and Concord blend into their priorities.
"""

import math

import numpy as np
from numba import njit

from planning.batch.classes import is_decode
from planning.batch.memory import OUTPUT_WEIGHT, PROMPT_WEIGHT
from planning.batch.ordered import run_by_bid, sorted_rows
from planning.batch.policy import policy
from planning.batch.worth import own_service
from planning.engine import EngineModel
from planning.order import numbers
from planning.tables import RequestTable

FAIRNESS = 0.3  # weight of fairness in Tempo and CALM; without a second tenant it changes nothing
FAIR_SPAN_TOKENS = 10_000.0  # weighted; tenants that are nearer to each other than this are treated nearly alike
FIRST_LEVEL_TOKENS = 512.0  # weighted service of PLAS' highest queue; each further one is twice as long
QUANTUM_STEPS = 20  # decoding steps between which nobody takes a request's place (Tempo section 4.2)


@njit(cache=True)
def at_boundary(row: np.void, quantum_steps: int) -> bool:
    """Whether the request has just come to the end of a quantum: only then it may be interrupted."""
    return not is_decode(row) or row["emitted_tokens"] % quantum_steps <= row["spec_tokens"]


@njit(cache=True)
def fairness(table: RequestTable) -> np.ndarray:
    """Fair(.) of each request (f8[rows], 0 to 1): 1 where its tenant is the least served one present."""
    fair = np.ones(len(table))
    if len(table) > 0:
        served = table["tenant_served"]
        least, span = served.min(), max(FAIR_SPAN_TOKENS, served.max() - served.min())
        for i in range(len(table)):
            fair[i] = 1.0 - (served[i] - least) / span
    return fair


@njit(cache=True)
def blend(table: RequestTable, weight: float, priorities: np.ndarray, costs: np.ndarray) -> None:
    """Replace priorities by ``(1 - f) priority + f (Fair - 1)`` in place, and costs alike (Tempo 4.3, Concord 4.3).

    Priorities are taken as parts of the highest one. The papers add ``f Fair``: a constant more, which would bring all
    priorities of a single tenant within CALM's cutoff.
    """
    if weight <= 0.0 or len(table) == 0:
        return
    scale, fair = (1.0 - weight) / max(priorities.max(), 1e-12), fairness(table)
    for i in range(len(table)):
        priorities[i] = scale * priorities[i] + weight * (fair[i] - 1.0)
        costs[i] = scale * costs[i] + weight * (fair[i] - 1.0)


@policy("vtc", remembers=True)
def form_virtual_token_counter(
    engine: EngineModel, table: RequestTable, now_s: float, tokens_out: np.ndarray
) -> tuple[float, np.ndarray]:
    """VTC (Sheng et al., OSDI 2024): newcomers of the tenant that was served least, by arrival; nobody is interrupted.

    Service is weighted tokens over the request's ``value``.
    """
    first, nobody = numbers(table["tenant_served"]), np.full(len(table), math.inf)
    for i in range(len(table)):
        if table[i]["running"]:
            first[i] = -math.inf
    return run_by_bid(engine, table, sorted_rows(first, table), (-nobody, nobody), True, tokens_out)


@njit(cache=True)
def attained_service(row: np.void) -> float:
    """``own_service``, with the whole prompt of a request that has lost its KV cache: else two that do not both fit
    would take each other's place for ever."""
    if row["preempted_at"] > 0:
        return float(PROMPT_WEIGHT * row["prompt_tokens"] + OUTPUT_WEIGHT * row["emitted_tokens"])
    return float(own_service(row))


@policy("plas", remembers=True)
def form_least_attained_service(
    engine: EngineModel, table: RequestTable, now_s: float, tokens_out: np.ndarray
) -> tuple[float, np.ndarray]:
    """Autellix' PLAS: requests of the program that was served least, in queues of doubling length, else by arrival.

    A request without a program counts its own service. At the end of a quantum a higher queue's request takes a place.
    """
    levels, costs = np.empty(len(table)), np.full(len(table), math.inf)
    for i in range(len(table)):
        row = table[i]
        served = row["program_served"] if row["program"] != 0 else attained_service(row)
        levels[i] = math.floor(math.log2(max(1.0, 2.0 * served / FIRST_LEVEL_TOKENS)))
        if at_boundary(row, QUANTUM_STEPS):
            costs[i] = 0.5 - levels[i]
    return run_by_bid(engine, table, sorted_rows(levels, table), (-levels, costs), True, tokens_out)
