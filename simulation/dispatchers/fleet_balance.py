"""Which replica of a simulated fleet takes a request: ``routing.placement`` with promises, or a balancer without.

The fleet reads the modelled engines' own tables. A request may be cut in two, a prompt for a prefill replica and the
other tokens for a decode replica.
"""

import math
from typing import NamedTuple

import numpy as np
from numba import njit

from planning.batch.classes import prefill_s
from planning.deadlines import next_token_deadline_s, num_uncomputed_tokens
from planning.engine import EngineModel
from planning.order import order_of
from planning.splitmix import GAMMA, mixed
from planning.tables import to_best_effort
from profiles.kernels import iteration_s
from routing.fleet_state import SHARED, FleetState
from routing.placement import NOWHERE, PLACEMENT, CandidateOrder, place
from routing.scores import LEAST_ADDED
from simulation.core.engine import Engines, submit
from simulation.core.prefill_forecast import forecast_prefills
from simulation.dispatchers.placement import refresh

BOTH, PREFILL, DECODE = range(3)  # sides of a request that a replica takes
BACKLOG_S = 0.5  # prompt tokens that wait count into the load as if they were due in so long
# The field's balancers; the load gradient without promises; and with them, by an exact replay on the replica that has
# the fewest requests, or on the one whose load grows least.
ROUTINGS = ("round_robin", "least_loaded", "power_of_two", "minimal_time", "gradient", "promise", "promise_added")
ROUND_ROBIN, LEAST_LOADED, POWER_OF_TWO, MINIMAL_TIME, GRADIENT, PROMISE, PROMISE_ADDED = range(len(ROUTINGS))

STATE = np.dtype(
    [
        ("now_s", "f8"),
        ("next", "i8"),  # position of the next arrival
        ("waiting", "i8"),  # jobs in the queue
        ("handed", "i8"),  # jobs in transfer
        ("left", "i8"),  # jobs that have not ended
        ("turn", "i8"),  # of round robin, and of drawing two
        ("retry_s", "f8"),  # how often what waits is asked about again; inf: nothing waits, it is refused at once
        ("retry_at_s", "f8"),
        ("routing", "i8"),
        ("is_split", "?"),  # prefill and decode on replicas of their own
        ("max_hops", "i8"),
        ("comfort", "f8"),  # load up to which the most loaded replica is wanted; beyond it the one with fewest requests
        ("prefill_comfort", "f8"),  # the same on a prefill side
    ]
)


class SimFleetState(NamedTuple):
    """Replicas and requests of a run."""

    state: np.ndarray  # STATE[1]
    engines: Engines
    fleet_state: FleetState  # over the engines' own tables
    sides: np.ndarray  # i1[R]
    seen: np.ndarray  # i8[R], iterations at which the mirrors' sums were made
    jobs: np.ndarray
    records: np.ndarray
    rows: np.ndarray  # REQUEST[jobs], as they are asked for


@njit(cache=True)
def look(fleet: SimFleetState) -> None:
    """Bring the mirrors' sums up to date."""
    refresh(fleet.fleet_state, fleet.engines, fleet.seen, fleet.state[0]["now_s"])


@njit(cache=True)
def latest_start_s(fleet: SimFleetState, job: int) -> float:
    """When the request has to start at the latest on an engine to itself."""
    row, now_s = fleet.rows[job], fleet.state[0]["now_s"]
    return next_token_deadline_s(row, now_s) - prefill_s(fleet.engines.planner_coefs[0], fleet.engines.limits[0], row)


@njit(cache=True)
def _takes(fleet: SimFleetState, r: int, side: int) -> bool:
    """Whether replica ``r`` takes this side of requests."""
    return bool(fleet.sides[r] == BOTH) or bool(fleet.sides[r] == side)


@njit(cache=True)
def put(fleet: SimFleetState, job: int) -> bool:
    """Place a job where it is wanted most; False where its SLO is promised nowhere."""
    routing, side = fleet.state[0]["routing"], DECODE if fleet.jobs[job]["prefilled"] > 0 else PREFILL
    if routing >= MINIMAL_TIME:
        look(fleet)
    if routing < PROMISE:
        r = _balanced(fleet, side, fleet.jobs[job]["tier"])
    elif not fleet.state[0]["is_split"]:
        r = _promised(fleet, job)
    elif side == PREFILL:
        r = _promised_prefill(fleet, job)
    else:  # its prompt is computed: too late to refuse it
        r = _most_wanted(fleet, side, fleet.jobs[job]["tier"])
    if r != NOWHERE:
        _give(fleet, job, r)
    return r != NOWHERE


@njit(cache=True)
def refuse(fleet: SimFleetState, job: int) -> None:
    """Serve a job best effort on the replica that has the fewest requests."""
    row, side, best = fleet.rows[job], DECODE if fleet.jobs[job]["prefilled"] > 0 else PREFILL, NOWHERE
    to_best_effort(row)
    for r in range(len(fleet.sides)):
        if _takes(fleet, r, side) and (
            best == NOWHERE or fleet.engines.state[r]["count"] < fleet.engines.state[best]["count"]
        ):
            best = r
    _give(fleet, job, best)


@njit(cache=True)
def _give(fleet: SimFleetState, job: int, r: int) -> None:
    """Queue a job's row at a replica."""
    row, record = fleet.rows[job], fleet.records[job]
    record["replica"], record["promised"] = r, not row["best_effort"]
    record["missed"] |= row["best_effort"] and not fleet.jobs[job]["best_effort"]
    submit(fleet.engines, r, row, fleet.state[0]["now_s"])


@njit(cache=True)
def _score(fleet: SimFleetState, r: int) -> float:
    """How much replica ``r`` is wanted: the most loaded up to a comfortable load, beyond it the fewest requests."""
    seen = fleet.fleet_state.replicas[r]
    load = seen["load"] + seen["backlog_tokens"] * seen["prompt_token_s"] / BACKLOG_S
    load_ceiling = fleet.state[0]["prefill_comfort"] if fleet.sides[r] == PREFILL else fleet.state[0]["comfort"]
    return load if load <= load_ceiling else -float(seen["count"])


@njit(cache=True)
def _cycle_s(fleet: SimFleetState, r: int) -> float:
    """Predicted time of the next iteration: every decode, and as much of the waiting prompts as the budget holds."""
    seen, decodes = fleet.fleet_state.replicas[r], fleet.fleet_state.replicas[r]["decodes"]
    room = max(0.0, fleet.engines.limits[r]["max_batch_tokens"] - decodes)
    tokens = decodes + min(room, seen["backlog_tokens"])
    return iteration_s(fleet.engines.planner_coefs[r], max(1.0, tokens), seen["decode_kv_tokens"], 0.0, decodes, 0.0)


@njit(cache=True)
def _draw(state: np.void, count: int) -> int:
    """A number below ``count`` that depends only on how many were drawn (splitmix64)."""
    state["turn"] += 1
    return int(mixed(np.uint64(state["turn"]) * GAMMA) % np.uint64(count))


@njit(cache=True)
def _takers(fleet: SimFleetState, side: int, tier: int) -> np.ndarray:
    """Replicas that take this side of a request of this tier."""
    takers, count = np.empty(len(fleet.sides), dtype=np.int64), 0
    for r in range(len(fleet.sides)):
        owner = fleet.fleet_state.replicas[r]["tier"]
        if _takes(fleet, r, side) and (owner == SHARED or owner == tier):  # noqa: SIM109 (numba wants equal types)
            takers[count] = r
            count += 1
    return takers[:count]


@njit(cache=True)
def _balanced(fleet: SimFleetState, side: int, tier: int) -> int:
    """Replica by a balancer among those that take the request."""
    state, takers, counts = fleet.state[0], _takers(fleet, side, tier), fleet.engines.state["count"]
    if state["routing"] == ROUND_ROBIN:
        state["turn"] += 1
        return takers[state["turn"] % len(takers)]
    if state["routing"] == POWER_OF_TWO:
        first, second = takers[_draw(state, len(takers))], takers[_draw(state, len(takers))]
        return first if counts[first] <= counts[second] else second
    if state["routing"] == GRADIENT:
        return _most_wanted(fleet, side, tier)
    best, best_score = takers[0], -math.inf
    for r in takers:
        score = -float(counts[r])
        if state["routing"] == MINIMAL_TIME:  # equal cycles, full ones among them: the shorter queue
            score = -_cycle_s(fleet, r) - 1e-9 * fleet.fleet_state.replicas[r]["backlog_tokens"]
        if score > best_score:
            best, best_score = r, score
    return best


@njit(cache=True)
def _most_wanted(fleet: SimFleetState, side: int, tier: int) -> int:
    """The most wanted replica that takes the request."""
    best, best_score = NOWHERE, -math.inf
    for r in _takers(fleet, side, tier):
        score = _score(fleet, r)
        if best == NOWHERE or score > best_score:
            best, best_score = r, score
    return best


@njit(cache=True)
def _promised(fleet: SimFleetState, job: int) -> int:
    """Replica that keeps every promise with the request, by the fleet kernel; ``NOWHERE``: none does."""
    state, placement, row = fleet.state[0], np.zeros(1, dtype=PLACEMENT), fleet.rows[job : job + 1]
    scores = np.empty((0, 0))
    if state["routing"] == PROMISE:
        scores = np.empty((1, len(fleet.sides)))
        for r in range(len(fleet.sides)):
            scores[0, r] = _score(fleet, r)
    order = CandidateOrder(scores, LEAST_ADDED, state["max_hops"], np.empty((0, 0), dtype=np.int64), False)
    place(fleet.fleet_state, row, state["now_s"], order, placement)
    return placement[0]["replica"]


@njit(cache=True)
def _promised_prefill(fleet: SimFleetState, job: int) -> int:
    """The prefill replica with least to do that brings the prompt in time (PolyServe section 4.7).

    Not the one with most: prompts of all tiers are served there by deadline, so filling one first gains nothing, and a
    first token that comes early is slack for the decode.
    """
    row, now_s, backlogs = fleet.rows[job], fleet.state[0]["now_s"], np.full(len(fleet.sides), -1.0)
    for r in range(len(fleet.sides)):
        if fleet.sides[r] == PREFILL:
            backlogs[r] = _promised_tokens(fleet, r)
    window_s = next_token_deadline_s(row, now_s) - now_s
    for r in order_of(backlogs):
        if backlogs[r] < 0.0:
            continue
        seconds = (backlogs[r] + row["prompt_tokens"]) * fleet.fleet_state.replicas[r]["prompt_token_s"]
        if seconds <= 2.0 * window_s and _outlook_holds(fleet, r, row):
            return r
    return NOWHERE


@njit(cache=True)
def _promised_tokens(fleet: SimFleetState, r: int) -> float:
    """Prompt tokens of replica ``r`` that stand before a newcomer: best effort does not."""
    tokens = 0.0
    for i in range(fleet.engines.state[r]["count"]):
        row = fleet.engines.tables[r, i]
        if not row["best_effort"]:
            tokens += max(0, num_uncomputed_tokens(row))
    return tokens


@njit(cache=True)
def _outlook_holds(fleet: SimFleetState, r: int, row: np.void) -> bool:
    """Whether prefill replica ``r`` keeps every first token on time that it would without the request, and its own."""
    count, start_s = fleet.engines.state[r]["count"], fleet.fleet_state.replicas[r]["free_at_s"]
    coef, limits = fleet.engines.planner_coefs[r], fleet.engines.limits[r]
    table, first_s = fleet.engines.tables[r, : count + 1], np.empty(count + 1)
    table[count] = row
    if forecast_prefills(EngineModel(coef, limits), table, start_s, first_s) >= 0.0:
        return True
    alone_s, holds = np.empty(count), next_token_deadline_s(row, start_s) >= first_s[count]
    forecast_prefills(EngineModel(coef, limits), table[:count], start_s, alone_s)
    for i in range(count):
        holds &= not alone_s[i] <= next_token_deadline_s(table[i], start_s) < first_s[i]
    return holds
