"""Placement over a whole fleet in one call: all mirrors in one table, screened by cached sums, confirmed by a replay.

The fleet's state is arrays, so that a decision over a hundred replicas costs one kernel call: a pass over cached sums
finds the most loaded replica that could still attain the SLO (PolyServe section 4.2, load gradient with lazy promotion
to tighter tiers), and only that one is checked exactly, by a replay of its own batches (SLOs-Serve section 4.2).
"""

import math
from typing import NamedTuple

import numpy as np
from numba import njit

from planning.choice import ADMITTED, BREAKS, KV_FULL, TOLERANCE_S, TTFT, mark_late, why_unattainable
from planning.deadlines import effective_tpot_s, next_due_s, remaining_tokens, todo_tokens
from planning.limits import LIMITS, make_limits
from planning.rollout import OUTLOOK, advance, rollout
from planning.room import held_kv_tokens, is_decode, prefill_s
from planning.tables import REQUEST
from profiles.kernels import COEFFICIENTS, K1_1, K1_2, K_KV, K_SEQ

SHARED = -1  # tier of a replica that serves every tier
NOWHERE = -1  # replica of a placement that failed
OPTIMISM = 1.1  # busy share up to which the screen lets a request through to the replay
SHORTEST_S = 1e-6  # paces below count as this

REPLICA = np.dtype(
    [
        ("is_open", "?"),  # live, takes new requests
        ("tier", "i4"),  # position in the tier table, tightest first, or SHARED
        ("count", "i4"),  # rows of its table in use
        ("free_at_s", "f8"),  # end of the iteration in flight; its rows are as they will be then
        # Sums over its rows, kept by summarize().
        ("token_rate", "f8"),  # decode tokens per second that its SLO requests are due, earned slack spread out
        ("rest_rate", "f8"),  # seconds per second of their KV reads and per-sequence overhead
        ("held_tokens", "f8"),  # KV held by SLO requests, and asked for by those that wait
        ("pace_s", "f8"),  # mean iteration time that the tightest of them can bear to its predicted end
        ("load", "f8"),  # part of its time or its KV that is taken, whichever is more
        ("is_judged", "?"),  # the doomed marks of its outlook are up to date
    ]
)
PLACEMENT = np.dtype(
    [
        ("replica", "i4"),
        ("reason", "i4"),  # planning.admission.REASONS
        ("hops", "i4"),  # replicas that were checked exactly
        ("first_s", "f8"),  # predicted time of the first token
        ("tpot_s", "f8"),
    ]
)


class Fleet(NamedTuple):
    """All replicas' mirrors; ``tables[r, : replicas[r]["count"]]`` are the requests of replica r."""

    replicas: np.ndarray  # REPLICA[R]
    tables: np.ndarray  # REQUEST[R, slots]
    outlooks: np.ndarray  # OUTLOOK[R, slots], of the last replay
    coefs: np.ndarray  # f8[R, COEFFICIENTS]
    limits: np.ndarray  # LIMITS[R]


def make_fleet(replicas: int, slots: int) -> Fleet:
    """A fleet of closed, empty replicas with room for ``slots`` requests each."""
    state = np.zeros(replicas, dtype=REPLICA)
    state["tier"] = SHARED
    return Fleet(
        state,
        np.zeros((replicas, slots), dtype=REQUEST),
        np.zeros((replicas, slots), dtype=OUTLOOK),
        np.zeros((replicas, COEFFICIENTS)),
        np.zeros(replicas, dtype=LIMITS),
    )


@njit(cache=True)
def bearable_pace_s(row: np.void, start_s: float) -> float:
    """Mean seconds per token that the request can bear to its predicted end: its TPOT and its earned slack."""
    pace_s = effective_tpot_s(row, start_s)
    if is_decode(row) and pace_s < math.inf:
        pace_s += max(0.0, next_due_s(row, start_s) - start_s - pace_s) / remaining_tokens(row)
    return pace_s


@njit(cache=True)
def _decode_rest_s(coef: np.ndarray, row: np.void) -> float:
    """Seconds of one decode step of the request beyond those of its tokens."""
    return coef[K_SEQ] + coef[K_KV] * (row["prompt_tokens"] + row["emitted_tokens"])


@njit(cache=True)
def _add_to_sums(replica: np.void, coef: np.ndarray, row: np.void, block_tokens: int) -> None:
    """Count one SLO request into the cached sums."""
    todo, pace_s = todo_tokens(row), bearable_pace_s(row, replica["free_at_s"])
    replica["held_tokens"] += held_kv_tokens(row, block_tokens) + (0 if row["running"] else todo)
    replica["token_rate"] += (1 + row["spec_tokens"]) / max(pace_s, SHORTEST_S)
    replica["rest_rate"] += _decode_rest_s(coef, row) / max(pace_s, SHORTEST_S)
    replica["pace_s"] = min(replica["pace_s"], pace_s)


@njit(cache=True)
def busy_share(coef: np.ndarray, token_rate: float, rest_rate: float, step_s: float) -> float:
    """Part of the time that decoding takes at these rates in iterations of ``step_s``; above 1 it cannot keep up."""
    share = 0.0
    for line in range(2):
        share = max(share, coef[2 * line] * token_rate + coef[2 * line + 1] / step_s)
    return share + rest_rate


@njit(cache=True)
def _weigh(replica: np.void, coef: np.ndarray, limits: np.void) -> None:
    """Load from the cached sums."""
    step_s = max(SHORTEST_S, min(replica["pace_s"], limits["max_iteration_s"]))
    time_load = busy_share(coef, replica["token_rate"], replica["rest_rate"], step_s)
    replica["load"] = max(time_load, replica["held_tokens"] / limits["kv_capacity_tokens"])


@njit(cache=True)
def summarize(fleet: Fleet, r: int) -> None:
    """Recompute the cached sums of replica ``r`` from its rows; call it after changing them."""
    replica, limits = fleet.replicas[r], fleet.limits[r]
    replica["token_rate"], replica["rest_rate"] = 0.0, 0.0
    replica["held_tokens"], replica["pace_s"], replica["is_judged"] = 0.0, math.inf, False
    for i in range(replica["count"]):
        row = fleet.tables[r, i]
        if not row["best_effort"] and todo_tokens(row) > 0:
            _add_to_sums(replica, fleet.coefs[r], row, limits["block_tokens"])
    _weigh(replica, fleet.coefs[r], limits)


@njit(cache=True)
def compact(fleet: Fleet, r: int) -> None:
    """Drop the rows of requests that have left, keeping the order of the others."""
    kept, replica = 0, fleet.replicas[r]
    for i in range(replica["count"]):
        row = fleet.tables[r, i]
        if row["running"] or todo_tokens(row) > 0:
            if kept < i:
                fleet.tables[r, kept] = row
                fleet.outlooks[r, kept] = fleet.outlooks[r, i]
            kept += 1
    replica["count"] = kept


@njit(cache=True)
def advance_fleet(fleet: Fleet, now_s: float, departs: bool = False) -> None:
    """Run every open replica's mirror up to the end of its iteration in flight at ``now_s``."""
    for r in range(len(fleet.replicas)):
        replica = fleet.replicas[r]
        if not replica["is_open"] or replica["free_at_s"] >= now_s:
            continue
        table = fleet.tables[r, : replica["count"]]
        replica["free_at_s"] = advance(fleet.coefs[r], table, replica["free_at_s"], now_s, fleet.limits[r], departs)
        compact(fleet, r)
        summarize(fleet, r)


@njit(cache=True)
def _group(replica: np.void, tier: int) -> int:
    """Order in which tiers are tried: its own, shared replicas, then tighter tiers from the nearest; -1: never."""
    if replica["tier"] == tier:
        return 0
    if replica["tier"] == SHARED or tier == SHARED:
        return 1
    return 1 + tier - replica["tier"] if replica["tier"] < tier else -1


@njit(cache=True)
def screen(replica: np.void, coef: np.ndarray, limits: np.void, row: np.void, now_s: float) -> int:
    """What the cached sums say about adding the request: ``ADMITTED`` for possible, or what stands against it.

    Decoding counts as a fluid that every request draws at its own pace. Errs on the side of ``ADMITTED``: a replay has
    the last word, and departures soon make room that the sums do not know of.
    """
    todo, start_s = todo_tokens(row), max(now_s, replica["free_at_s"])
    if replica["held_tokens"] + todo > limits["kv_capacity_tokens"] * (1.0 - limits["kv_headroom"]):
        return KV_FULL
    window_s, own_s = next_due_s(row, start_s) - start_s, effective_tpot_s(row, start_s)
    if window_s < prefill_s(coef, row, limits):
        return TTFT
    step_s = max(SHORTEST_S, min(replica["pace_s"], own_s, limits["max_iteration_s"]))
    token_rate = replica["token_rate"] + 1.0 / max(own_s, SHORTEST_S)
    rest_rate = replica["rest_rate"] + _decode_rest_s(coef, row) / max(own_s, SHORTEST_S)
    if busy_share(coef, token_rate, rest_rate, step_s) > OPTIMISM:
        return BREAKS
    free_share = max(0.0, OPTIMISM - busy_share(coef, replica["token_rate"], replica["rest_rate"], step_s))
    return ADMITTED if todo * max(coef[K1_1], coef[K1_2]) <= free_share * (window_s + step_s) else TTFT


@njit(cache=True)
def _next_candidate(fleet: Fleet, row: np.void, now_s: float, is_tried: np.ndarray) -> tuple[int, int]:
    """Untried replica to check next: the first group's most loaded one that passes the screen, and the last objection.

    A replica is screened only if it would be preferred to the best so far.
    """
    best, best_group, best_load, objection = NOWHERE, 0, 0.0, TTFT
    for r in range(len(fleet.replicas)):
        replica = fleet.replicas[r]
        if is_tried[r] or not replica["is_open"] or replica["count"] >= fleet.tables.shape[1]:
            continue
        group, load = _group(replica, row["tier"]), replica["load"]
        if group < 0 or (best != NOWHERE and (group > best_group or (group == best_group and load <= best_load))):
            continue
        reason = screen(replica, fleet.coefs[r], fleet.limits[r], row, now_s)
        if reason == ADMITTED:
            best, best_group, best_load = r, group, load
        else:
            objection = reason
    return best, objection


@njit(cache=True)
def _replay(fleet: Fleet, r: int, row: np.void, now_s: float) -> int:
    """Reason code for the request on replica ``r`` by a replay with it in the next free row."""
    place = fleet.replicas[r]["count"]
    start_s = max(now_s, fleet.replicas[r]["free_at_s"])
    fleet.tables[r, place] = row
    table, outlook = fleet.tables[r, : place + 1], fleet.outlooks[r, : place + 1]
    if not fleet.replicas[r]["is_judged"]:
        mark_late(fleet.coefs[r], fleet.limits[r], table, start_s, outlook)
    outlook[place]["doomed"] = False
    worst_s, peak_tokens = rollout(fleet.coefs[r], table, start_s, fleet.limits[r], -TOLERANCE_S, outlook)
    return why_unattainable(row, outlook[place], worst_s, peak_tokens, fleet.limits[r])


@njit(cache=True)
def _judge(fleet: Fleet, r: int, now_s: float) -> bool:
    """Mark the requests of replica ``r`` that will miss anyway; True when there are any."""
    count, found = fleet.replicas[r]["count"], False
    outlook = np.zeros(count, dtype=OUTLOOK)
    start_s = max(now_s, fleet.replicas[r]["free_at_s"])
    rollout(fleet.coefs[r], fleet.tables[r, :count], start_s, fleet.limits[r], -math.inf, outlook)
    for i in range(count):
        fleet.outlooks[r, i]["doomed"] = outlook[i]["margin_s"] < -TOLERANCE_S
        found |= fleet.outlooks[r, i]["doomed"]
    fleet.replicas[r]["is_judged"] = True
    return found


@njit(cache=True)
def check_replica(fleet: Fleet, r: int, row: np.void, now_s: float) -> int:
    """Exact reason code for the request on replica ``r``: ``ADMITTED`` when every promise there holds with it."""
    reason = _replay(fleet, r, row, now_s)
    if reason == BREAKS and not fleet.replicas[r]["is_judged"] and _judge(fleet, r, now_s):
        reason = _replay(fleet, r, row, now_s)
    return reason


@njit(cache=True)
def commit(fleet: Fleet, r: int, row: np.void) -> None:
    """Put the request on replica ``r`` and count it into its sums."""
    replica = fleet.replicas[r]
    fleet.tables[r, replica["count"]] = row
    replica["count"] += 1
    if not row["best_effort"]:
        _add_to_sums(replica, fleet.coefs[r], row, fleet.limits[r]["block_tokens"])
        _weigh(replica, fleet.coefs[r], fleet.limits[r])


@njit(cache=True)
def place_one(fleet: Fleet, row: np.void, now_s: float, max_hops: int, placement: np.void) -> None:
    """Place one request, or say what stood against it last."""
    is_tried = np.zeros(len(fleet.replicas), dtype=np.bool_)
    placement["replica"], placement["hops"] = NOWHERE, 0
    placement["first_s"], placement["tpot_s"] = math.inf, math.inf
    while placement["hops"] < max_hops:
        r, objection = _next_candidate(fleet, row, now_s, is_tried)
        if r == NOWHERE:
            if placement["hops"] == 0:
                placement["reason"] = objection
            return
        is_tried[r] = True
        placement["hops"] += 1
        placement["reason"] = check_replica(fleet, r, row, now_s)
        if placement["reason"] == ADMITTED:
            seen = fleet.outlooks[r, fleet.replicas[r]["count"]]
            placement["replica"], placement["first_s"], placement["tpot_s"] = r, seen["first_s"], seen["tpot_s"]
            commit(fleet, r, row)
            return


@njit(cache=True)
def place(fleet: Fleet, rows: np.ndarray, now_s: float, max_hops: int, placements: np.ndarray) -> None:
    """Place requests that arrived together (REQUEST[k] to PLACEMENT[k]) and commit what is admitted.

    The shortest prompts go first: in a burst they are the ones that can all be served (least work per promise).
    """
    for i in np.argsort(rows["prompt_tokens"].copy(), kind="mergesort"):
        place_one(fleet, rows[i], now_s, max_hops, placements[i])


def warm_up_placement() -> None:
    """Compile the fleet's kernels at start-up, or load them from the cache."""
    fleet, rows = make_fleet(1, 2), np.zeros(1, dtype=REQUEST)
    fleet.limits[:] = make_limits(kv_capacity_tokens=1024)
    summarize(fleet, 0)
    advance_fleet(fleet, 0.0)
    place(fleet, rows, 0.0, 1, np.zeros(1, dtype=PLACEMENT))
