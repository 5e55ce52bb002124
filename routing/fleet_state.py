"""The replicas of a whole fleet in arrays that kernels share: rows, cached sums, and how they move on.

A decision over a hundred replicas reads the sums only; they are recomputed when a replica's rows change.
"""

import math
from typing import NamedTuple

import numpy as np
from numba import from_dtype, intp, njit, typeof, types

from planning.batch.classes import decode_s, is_decode
from planning.batch.kv import wanted_kv_tokens
from planning.batch.speculation import drafts_to_promise
from planning.deadlines import effective_tpot_s, next_token_deadline_s, num_uncomputed_tokens, remaining_tokens
from planning.engine import EngineModel
from planning.forecast.lockstep import accepted_tokens
from planning.forecast.rollout import FORECAST, advance
from planning.limits import LIMITS, usable_kv_tokens
from planning.tables import REQUEST
from profiles.compiled_once import compiled_once
from profiles.kernels import COEFFICIENTS, LINES, Coefficients, iteration_s, kv_read_s, overhead_s, roofline, token_s

SHARED = -1  # tier of a replica that serves every tier
RESERVED = -2  # tier of one that serves best effort only
SHORTEST_S = 1e-6  # paces below count as this

REPLICA_STATE = np.dtype(
    [
        ("is_open", "?"),  # live, takes new requests
        ("tier", "i4"),  # position in the tier table, tightest first, SHARED or RESERVED
        ("count", "i4"),  # rows of its table in use
        ("free_at_s", "f8"),  # end of the iterations in flight; its rows are as they will be then
        ("ahead_s", "f8"),  # how long before that the next iteration is formed (``planning.forecast.rollout``)
        ("formed", "i4"),  # iterations that it has formed by then, since the beginning of one was told
        ("flight_s", "f8"),  # how long the last of them takes; 0: idle
        ("error", "f8"),  # of its predictions of an iteration, in the mean, relative
        # Sums over its rows, kept by ``recompute_load``.
        ("token_rate", "f8"),  # decode tokens per second that its SLO requests are due, earned slack spread out
        ("rest_rate", "f8"),  # seconds per second of their KV reads and per-sequence overhead
        ("held_tokens", "f8"),  # KV that SLO requests hold, or need to begin; best effort counts nothing
        ("pace_s", "f8"),  # mean iteration time that the tightest of them can bear to its predicted end
        ("load", "f8"),  # part of its time, its KV or its sequences that is taken, whichever is most
        ("best_effort", "i4"),  # requests without objective
        ("backlog_tokens", "f8"),  # prompt tokens of all requests that are not computed yet
        ("peak_tokens", "f8"),  # KV of all requests at their predicted ends: more than they hold at one time
        ("decodes", "i4"),
        ("decode_kv_tokens", "f8"),  # that an iteration of all decodes reads
        ("step_s", "f8"),  # and the time it takes
        ("prompt_token_s", "f8"),  # seconds per prompt token in large batches
        ("usable_tokens", "f8"),  # KV cache less its headroom
        ("forecast_is_fresh", "?"),  # the unattainable marks of its forecast are up to date
    ]
)


class FleetState(NamedTuple):
    """State of all replicas; ``tables[r, : replicas[r]["count"]]`` are the requests of replica r."""

    replicas: np.ndarray  # REPLICA_STATE[R]
    tables: np.ndarray  # REQUEST[R, slots]
    forecasts: np.ndarray  # FORECAST[R, slots], of the last forecast
    coefs: np.ndarray  # f8[R, COEFFICIENTS], by which replicas move on
    pessimistic_coefs: np.ndarray  # f8[R, COEFFICIENTS], by which promises are made
    limits: np.ndarray  # LIMITS[R]


def make_fleet_state(replicas: int, slots: int) -> FleetState:
    """Closed, empty replicas with room for ``slots`` requests each."""
    state = np.zeros(replicas, dtype=REPLICA_STATE)
    state["tier"] = SHARED
    return FleetState(
        state,
        np.zeros((replicas, slots), dtype=REQUEST),
        np.zeros((replicas, slots), dtype=FORECAST),
        np.zeros((replicas, COEFFICIENTS)),
        np.zeros((replicas, COEFFICIENTS)),
        np.zeros(replicas, dtype=LIMITS),
    )


REPLICA_TYPE = from_dtype(REPLICA_STATE)
FLEET_TYPE = typeof(make_fleet_state(1, 1))  # as kernels see it


def resized(fleet: FleetState, replicas: int, slots: int) -> FleetState:
    """A copy with room for at least as many replicas and requests as before."""
    larger = make_fleet_state(replicas, slots)
    known, used = fleet.forecasts.shape
    for old, new in zip(fleet, larger, strict=True):
        if new.shape[1:] == old.shape[1:]:
            new[:known] = old
        else:
            new[:known, :used] = old
    return larger


@njit(inline="always")  # not callable from Python: a compiled function cannot return a tuple with a record
def engine_of(fleet: FleetState, r: int) -> EngineModel:
    """The engine of replica ``r`` as promises are made by: its iterations take a little longer than expected."""
    return EngineModel(fleet.pessimistic_coefs[r], fleet.limits[r])


@njit(cache=True)
def max_pace_s(row: np.void, start_s: float) -> float:
    """Mean seconds per token that the request can bear to its predicted end: its TPOT and its earned slack."""
    pace_s = effective_tpot_s(row, start_s)
    if is_decode(row) and pace_s < math.inf:
        pace_s += max(0.0, next_token_deadline_s(row, start_s) - start_s - pace_s) / remaining_tokens(row)
    return pace_s


@njit(cache=True)
def decode_rest_s(coef: Coefficients, row: np.void) -> float:
    """Seconds of one decode step of the request beyond those of its tokens."""
    return overhead_s(coef, 1.0) + kv_read_s(coef, row["prompt_tokens"] + row["emitted_tokens"])


@njit(cache=True)
def set_drafts(engine: EngineModel, replica: np.void, row: np.void) -> None:
    """Write how deep the replica is to speculate for a request that joins it, or is there."""
    decodes, kv_tokens = replica["decodes"], replica["decode_kv_tokens"]
    row["spec_tokens"] = drafts_to_promise(engine, row, replica["free_at_s"], decodes, kv_tokens)


@njit(cache=True)
def set_all_drafts(fleet: FleetState, r: int, rows: np.ndarray) -> None:
    """``set_drafts`` for requests (REQUEST[k]) that may join replica ``r``."""
    for i in range(len(rows)):
        set_drafts(engine_of(fleet, r), fleet.replicas[r], rows[i])


@njit(cache=True)
def _count_decode(replica: np.void, row: np.void) -> None:
    """Count one request into what an iteration of all decodes does: known before any of them is weighed."""
    if is_decode(row):
        replica["decodes"] += 1
        replica["decode_kv_tokens"] += row["prompt_tokens"] + row["emitted_tokens"]


@njit(cache=True)
def _add_to_sums(replica: np.void, engine: EngineModel, row: np.void) -> None:
    """Count one request into the cached sums, with as many drafts as it is promised by; best effort takes no part in
    the load."""
    coef, limits = engine.coef, engine.limits
    set_drafts(engine, replica, row)
    todo = num_uncomputed_tokens(row)
    replica["backlog_tokens"] += max(0, todo - 1)
    replica["peak_tokens"] += row["prompt_tokens"] + row["output_tokens"]
    if row["best_effort"]:
        replica["best_effort"] += 1
        return
    if todo <= 0:
        return
    replica["held_tokens"] += wanted_kv_tokens(row, limits["block_tokens"])
    pace_s = max_pace_s(row, replica["free_at_s"]) * accepted_tokens(row["spec_tokens"], limits["acceptance"])  # a step
    if pace_s < decode_s(coef, row):
        return  # no engine is so fast: it is late, and takes part in what time is left
    replica["token_rate"] += (1 + row["spec_tokens"]) / max(pace_s, SHORTEST_S)
    replica["rest_rate"] += decode_rest_s(coef, row) / max(pace_s, SHORTEST_S)
    replica["pace_s"] = min(replica["pace_s"], pace_s)


@njit(cache=True)
def utilization(coef: Coefficients, token_rate: float, rest_rate: float, step_s: float) -> float:
    """Part of the time that decoding takes at these rates in iterations of ``step_s``; above 1 it cannot keep up."""
    share = 0.0
    for line in range(LINES):
        slope, base = roofline(coef, line)
        share = max(share, slope * token_rate + base / step_s)
    return share + rest_rate


@njit(cache=True)
def _weigh(coef: Coefficients, limits: np.void, replica: np.void) -> None:
    """Load, speeds and room from the cached sums."""
    step_s = max(SHORTEST_S, min(replica["pace_s"], limits["max_iteration_s"]))
    time_load = utilization(coef, replica["token_rate"], replica["rest_rate"], step_s)
    sequence_load = (replica["count"] - replica["best_effort"]) / limits["max_running"]
    replica["load"] = max(time_load, replica["held_tokens"] / limits["kv_capacity_tokens"], sequence_load)
    decodes = replica["decodes"]
    replica["step_s"] = iteration_s(coef, decodes, replica["decode_kv_tokens"], 0.0, decodes, 0.0)
    replica["prompt_token_s"] = token_s(coef)
    replica["usable_tokens"] = usable_kv_tokens(limits)


@compiled_once(types.void(FLEET_TYPE, intp))
def recompute_load(fleet: FleetState, r: int) -> None:
    """Recompute the cached sums of replica ``r`` from its rows; call it after changing them."""
    replica, engine = fleet.replicas[r], engine_of(fleet, r)
    replica["token_rate"], replica["rest_rate"], replica["pace_s"] = 0.0, 0.0, math.inf
    replica["held_tokens"], replica["backlog_tokens"], replica["peak_tokens"] = 0.0, 0.0, 0.0
    replica["decodes"], replica["decode_kv_tokens"], replica["best_effort"] = 0, 0.0, 0
    replica["forecast_is_fresh"] = False
    for i in range(replica["count"]):
        _count_decode(replica, fleet.tables[r, i])
    for i in range(replica["count"]):
        _add_to_sums(replica, engine, fleet.tables[r, i])
    _weigh(engine.coef, engine.limits, replica)


@njit(cache=True)
def compact(fleet: FleetState, r: int) -> None:
    """Drop the rows of requests that have left, keeping the order of the others."""
    kept, replica = 0, fleet.replicas[r]
    for i in range(replica["count"]):
        row = fleet.tables[r, i]
        if row["running"] or num_uncomputed_tokens(row) > 0:
            if kept < i:
                fleet.tables[r, kept] = row
                fleet.forecasts[r, kept] = fleet.forecasts[r, i]
            kept += 1
    replica["count"] = kept


@njit(cache=True)
def formed_s(replica: np.void) -> float:
    """When the next iteration of a replica (REPLICA_STATE[]) is formed: who comes later is not part of it."""
    return float(replica["free_at_s"] - replica["ahead_s"])


@njit(cache=True)
def advance_replica(fleet: FleetState, r: int, now_s: float, departs: bool = False) -> None:
    """Run the mirror of replica ``r`` up to the end of its iterations in flight at ``now_s``.

    With ``departs`` requests leave at their predicted lengths; without, when they are known to have left.
    """
    replica = fleet.replicas[r]
    table = fleet.tables[r, : replica["count"]]
    free_at_s, ahead_s, formed, last_s = advance(
        EngineModel(fleet.coefs[r], fleet.limits[r]), table, replica["free_at_s"], replica["ahead_s"], now_s, departs
    )
    if free_at_s > replica["free_at_s"]:
        replica["flight_s"], replica["formed"] = last_s, replica["formed"] + formed if last_s > 0.0 else 0
    replica["free_at_s"], replica["ahead_s"] = free_at_s, ahead_s
    if departs:
        compact(fleet, r)
    recompute_load(fleet, r)


@njit(cache=True)
def advance_fleet(fleet: FleetState, now_s: float, departs: bool = False, lag_s: float = 0.0) -> None:
    """``advance_replica`` for every open replica that is more than ``lag_s`` behind."""
    for r in range(len(fleet.replicas)):
        if fleet.replicas[r]["is_open"] and formed_s(fleet.replicas[r]) < now_s - lag_s:
            advance_replica(fleet, r, now_s, departs)


@njit(cache=True)
def _move_row(fleet: FleetState, r: int, i: int, to: int) -> None:
    """Move a row to another position of its table, the ones between up or down by one."""
    row, forecast, step = fleet.tables[r, i : i + 1].copy(), fleet.forecasts[r, i : i + 1].copy(), 1 if to > i else -1
    for k in range(i, to, step):
        fleet.tables[r, k], fleet.forecasts[r, k] = fleet.tables[r, k + step], fleet.forecasts[r, k + step]
    fleet.tables[r, to], fleet.forecasts[r, to] = row[0], forecast[0]


@njit(cache=True)
def hold_request(fleet: FleetState, r: int, request_id: int) -> None:
    """A request of replica ``r`` stays away from its engine for now: it has its place in forecasts, and the mirror does
    not run it. Such rows are the last of their table, ``joined_s`` is inf."""
    last = fleet.replicas[r]["count"] - 1
    for i in range(last + 1):
        if fleet.tables[r, i]["id"] == request_id:
            fleet.tables[r, i]["joined_s"] = math.inf
            _move_row(fleet, r, i, last)
            return


@njit(cache=True)
def add_request(fleet: FleetState, r: int, row: np.void) -> None:
    """Put the request on replica ``r``, before those that are held, and count it into its sums."""
    replica, engine, at = fleet.replicas[r], engine_of(fleet, r), fleet.replicas[r]["count"]
    fleet.tables[r, at] = row
    replica["count"] += 1
    while at > 0 and fleet.tables[r, at - 1]["joined_s"] == math.inf:
        at -= 1
    if at < replica["count"] - 1:
        _move_row(fleet, r, replica["count"] - 1, at)
    _count_decode(replica, row)
    _add_to_sums(replica, engine, fleet.tables[r, at])
    _weigh(engine.coef, engine.limits, replica)


@njit(cache=True)
def remove_request(fleet: FleetState, r: int, request_id: int) -> bool:
    """Remove a request from replica ``r``, keeping the order of the others; whether it was there."""
    kept, replica = 0, fleet.replicas[r]
    for i in range(replica["count"]):
        if fleet.tables[r, i]["id"] != request_id:
            if kept < i:
                fleet.tables[r, kept] = fleet.tables[r, i]
                fleet.forecasts[r, kept] = fleet.forecasts[r, i]
            kept += 1
    found = kept < replica["count"]
    replica["count"] = kept
    if found:
        recompute_load(fleet, r)
    return found
