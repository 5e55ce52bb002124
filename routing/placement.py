"""Placement over a whole fleet in one call: checked by cached sums, confirmed by a forecast of the replica's batches.

A pass over cached sums finds the best scored replica that could still attain the SLO, and only that one is checked
exactly (SLOs-Serve section 4.2). Scores come from the routing policy or from a rule of ``routing.scores``. Replicas of
the request's own tier are tried first, then tighter ones: lazy promotion (PolyServe section 4.2).
"""

import math
from typing import NamedTuple

import numpy as np
from numba import boolean, float64, int64, intp, njit, typeof, types, void

from planning.admission.search import ADMITTED, BREAKS, TTFT, mark_late, why_unattainable
from planning.deadlines import num_uncomputed_tokens
from planning.forecast.rollout import FORECAST, TOLERANCE_S, forecast_requests
from planning.order import numbers, order_of
from planning.tables import REQUEST, ROW_TYPE, TABLE_TYPE
from profiles.compiled_once import compiled_once
from routing.chance import first_token_chance, is_likely
from routing.fleet_state import (
    FLEET_TYPE,
    RESERVED,
    SHARED,
    FleetState,
    add_request,
    advance_replica,
    engine_of,
    formed_s,
    set_drafts,
)
from routing.quick_check import quick_check
from routing.scores import MOST_LOADED, base_weight, score_replica

NOWHERE = -1  # replica of a placement that failed


NO_SCORES = np.zeros((0, 0))  # none are given: ``rule`` decides
NONE_CACHED = np.zeros((0, 0), dtype=np.int64)


class CandidateOrder(NamedTuple):
    """In which order replicas are tried, and how many of them."""

    scores: np.ndarray  # f8[k, R], what each request scores each replica, -inf for never; ``NO_SCORES``: by ``rule``
    rule: int  # of ``routing.scores``, at the moment of placement
    max_hops: int  # exact checks
    cached: np.ndarray = NONE_CACHED  # i8[k, R], tokens of each prompt that are certain to be in the prefix caches
    is_lagging: bool = False  # mirrors may be behind: who is checked exactly is moved on to now before


ORDER_TYPE = typeof(CandidateOrder(np.empty((0, 0)), 0, 0))  # as kernels see it
PLACEMENT = np.dtype(
    [
        ("replica", "i4"),
        ("reason", "i4"),  # planning.admission.plan.REASONS
        ("hops", "i4"),  # replicas that were checked exactly
        ("begin_s", "f8"),  # predicted start of the first iteration that computes some of it
        ("first_s", "f8"),  # predicted time of the first token
        ("tpot_s", "f8"),
        ("chance", "f8"),  # that the first token comes in time
    ]
)


@njit(cache=True)
def tier_distance(replica_tier: int, tier: int) -> int:
    """Order in which replicas are tried: those of the request's tier, shared ones, tighter tiers from the nearest; -1:
    never, because it is reserved, or a looser tier's iterations are longer than the request's TPOT allows."""
    if replica_tier == tier:
        return 0
    if replica_tier == RESERVED:
        return -1
    if replica_tier == SHARED or tier == SHARED:
        return 1
    return 1 + tier - replica_tier if replica_tier < tier else -1


@njit(cache=True, inline="always")
def _note_cached(row: np.void, order: CandidateOrder, r: int) -> None:
    """Write what replica ``r`` need not compute of the prompt."""
    if len(order.cached):
        row["computed_tokens"] = order.cached[0, r]


@njit(cache=True)
def _dominates(row: np.void, refused: np.void) -> bool:
    """Whether the request is in no respect easier to serve than one that was refused."""
    return (
        num_uncomputed_tokens(row) >= num_uncomputed_tokens(refused)
        and row["output_tokens"] - row["emitted_tokens"] >= refused["output_tokens"] - refused["emitted_tokens"]
        and row["arrival_s"] + row["ttft_s"] <= refused["arrival_s"] + refused["ttft_s"]
        and row["tpot_s"] <= refused["tpot_s"]
        and row["deadline_s"] <= refused["deadline_s"]
        and row["emitted_tokens"] == 0
        and row["least_chance"] >= refused["least_chance"]
    )


@njit(cache=True)
def _max_load_after_refusal(
    fleet: FleetState, row: np.void, order: CandidateOrder, is_tried: np.ndarray, last: int
) -> float:
    """Most that the next replica of the load gradient may be loaded after ``last`` refused: halfway to the emptiest.

    A refusal says little of much emptier replicas and nearly everything of those that are as full. Bisecting finds the
    most loaded replica with room in few checks however large the fleet is.
    """
    if len(order.scores) or order.rule != MOST_LOADED or last == NOWHERE:
        return math.inf
    group, least = tier_distance(fleet.replicas[last]["tier"], row["tier"]), fleet.replicas[last]["load"]
    for r in range(len(fleet.replicas)):
        replica = fleet.replicas[r]
        if not is_tried[r] and replica["is_open"] and tier_distance(replica["tier"], row["tier"]) == group:
            least = min(least, replica["load"])
    return 0.5 * (least + fleet.replicas[last]["load"])


@compiled_once(types.UniTuple(intp, 2)(FLEET_TYPE, ROW_TYPE, float64, ORDER_TYPE, boolean[::1], intp))
def _next_candidate(
    fleet: FleetState,
    row: np.void,
    now_s: float,
    order: CandidateOrder,
    is_tried: np.ndarray,
    last: int,
) -> tuple[int, int]:
    """Untried replica to check after ``last`` refused: the best scored of the first group that passes the quick check,
    and the last objection. A replica is checked only if it ranks before the best so far."""
    best, best_group, best_score, reject_reason = NOWHERE, 0, 0.0, TTFT
    bound = _max_load_after_refusal(fleet, row, order, is_tried, last)
    weight = 1.0 if len(order.scores) else base_weight(fleet)
    last_group = tier_distance(fleet.replicas[last]["tier"], row["tier"]) if last != NOWHERE else 0
    for r in range(len(fleet.replicas)):
        replica = fleet.replicas[r]
        if is_tried[r] or not replica["is_open"] or replica["count"] >= fleet.tables.shape[1]:
            continue
        group = tier_distance(replica["tier"], row["tier"])
        if group < last_group:
            continue
        _note_cached(row, order, r)
        if len(order.scores):
            score = order.scores[0, r]
        else:
            score = score_replica(order.rule, engine_of(fleet, r), replica, row, now_s, weight)
        if score == -math.inf or (group == last_group and score > bound):
            continue
        if best != NOWHERE and (group > best_group or (group == best_group and score <= best_score)):
            continue
        reason = quick_check(engine_of(fleet, r), replica, row, now_s)
        if reason == ADMITTED:
            best, best_group, best_score = r, group, score
        else:
            reject_reason = reason
    return best, reject_reason


@njit(cache=True, inline="always")
def _forecast_replica(fleet: FleetState, r: int, row: np.void, now_s: float) -> int:
    """Reason code for the request on replica ``r`` by a forecast with it in the next free row."""
    engine, count = engine_of(fleet, r), fleet.replicas[r]["count"]
    start_s = max(now_s, fleet.replicas[r]["free_at_s"])
    fleet.tables[r, count] = row
    set_drafts(engine, fleet.replicas[r], fleet.tables[r, count])
    table, forecast = fleet.tables[r, : count + 1], fleet.forecasts[r, : count + 1]
    if not fleet.replicas[r]["forecast_is_fresh"]:
        mark_late(engine, table, start_s, forecast)
    forecast[count]["unattainable"] = False
    worst_s, peak_tokens = forecast_requests(engine, table, start_s, -TOLERANCE_S, forecast)
    reason = why_unattainable(row, forecast[count], worst_s, peak_tokens, engine.limits)
    if reason == ADMITTED and not is_likely(fleet, r, row, _chance(fleet, r, row, now_s)):
        reason = TTFT
    return reason


@njit(cache=True)
def _chance(fleet: FleetState, r: int, row: np.void, now_s: float) -> float:
    """That the first token of a request, which was forecast for replica ``r``, comes in time."""
    first_s = fleet.forecasts[r, fleet.replicas[r]["count"]]["first_s"]
    return first_token_chance(fleet.replicas[r], fleet.limits[r], row, first_s, now_s)


@njit(cache=True, inline="always")
def _refresh_forecast(fleet: FleetState, r: int, now_s: float) -> bool:
    """Mark the requests of replica ``r`` that will miss anyway; True when there are any."""
    count, found = fleet.replicas[r]["count"], False
    forecast = np.zeros(count, dtype=FORECAST)
    start_s = max(now_s, fleet.replicas[r]["free_at_s"])
    forecast_requests(engine_of(fleet, r), fleet.tables[r, :count], start_s, -math.inf, forecast)
    for i in range(count):
        fleet.forecasts[r, i]["unattainable"] = forecast[i]["margin_s"] < -TOLERANCE_S
        found |= fleet.forecasts[r, i]["unattainable"]
    fleet.replicas[r]["forecast_is_fresh"] = True
    return found


@compiled_once(int64(FLEET_TYPE, intp, ROW_TYPE, float64))
def check_replica(fleet: FleetState, r: int, row: np.void, now_s: float) -> int:
    """Exact reason code for the request on replica ``r``: ``ADMITTED`` when every promise there holds with it."""
    reason = _forecast_replica(fleet, r, row, now_s)
    if reason == BREAKS and not fleet.replicas[r]["forecast_is_fresh"] and _refresh_forecast(fleet, r, now_s):
        reason = _forecast_replica(fleet, r, row, now_s)
    return reason


@compiled_once(void(FLEET_TYPE, ROW_TYPE, ORDER_TYPE, TABLE_TYPE, boolean[::1]))
def _skip_dominated(
    fleet: FleetState, row: np.void, order: CandidateOrder, refused: np.ndarray, is_tried: np.ndarray
) -> None:
    """Mark replicas that refused an easier request of the same burst: they have only been given more since."""
    for r in range(len(fleet.replicas)):
        _note_cached(row, order, r)
        is_tried[r] = refused[r]["prompt_tokens"] > 0 and _dominates(row, refused[r])


@njit(cache=True, inline="always")
def _place_one(
    fleet: FleetState,
    row: np.void,
    now_s: float,
    order: CandidateOrder,
    refused: np.ndarray,
    placement: np.void,
) -> None:
    """Place one request, or say what stood against it last; ``refused`` (REQUEST[R]) remembers who said no to what."""
    is_tried = np.zeros(len(fleet.replicas), dtype=np.bool_)
    if len(refused):
        _skip_dominated(fleet, row, order, refused, is_tried)
    placement["replica"], placement["hops"], placement["chance"], r = NOWHERE, 0, 1.0, NOWHERE
    placement["begin_s"], placement["first_s"], placement["tpot_s"] = math.inf, math.inf, math.inf
    while placement["hops"] < order.max_hops:
        r, reject_reason = _next_candidate(fleet, row, now_s, order, is_tried, r)
        if r == NOWHERE:
            if placement["hops"] == 0:
                placement["reason"] = reject_reason
            return
        is_tried[r] = True
        placement["hops"] += 1
        _note_cached(row, order, r)
        if order.is_lagging and formed_s(fleet.replicas[r]) < now_s:
            advance_replica(fleet, r, now_s)
        placement["reason"] = check_replica(fleet, r, row, now_s)
        if placement["reason"] == ADMITTED:
            row_forecast = fleet.forecasts[r, fleet.replicas[r]["count"]]
            placement["replica"], placement["begin_s"] = r, row_forecast["begin_s"]
            placement["first_s"], placement["tpot_s"] = row_forecast["first_s"], row_forecast["tpot_s"]
            placement["chance"] = _chance(fleet, r, row, now_s)
            add_request(fleet, r, row)
            return
        if len(refused):
            refused[r] = row


@njit(cache=True)
def place(
    fleet: FleetState,
    rows: np.ndarray,
    now_s: float,
    order: CandidateOrder,
    placements: np.ndarray,
) -> None:
    """Place requests that arrived together (REQUEST[k] to PLACEMENT[k]) and commit what is admitted. ``rows`` are
    written to.

    The shortest prompts per value go first: in a burst they are the ones that can all be served.
    """
    refused = np.zeros(len(fleet.replicas) if len(rows) > 1 else 0, dtype=REQUEST)
    for i in order_of(numbers(rows["prompt_tokens"] / rows["value"])):
        scores = order.scores[i : i + 1] if len(order.scores) else order.scores
        cached = order.cached[i : i + 1] if len(order.cached) else order.cached
        own = CandidateOrder(scores, order.rule, order.max_hops, cached, order.is_lagging)
        _place_one(fleet, rows[i], now_s, own, refused, placements[i])
