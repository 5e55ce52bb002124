"""Placement over a whole fleet in one call: screened by cached sums, confirmed by a replay of the replica's batches.

A pass over cached sums finds the most wanted replica that could still attain the SLO, and only that one is checked
exactly (SLOs-Serve section 4.2). Most wanted is what the routing policy prefers, or else what a rule of
``routing.wishes`` says; inside the order of groups that makes lazy promotion to tighter tiers (PolyServe section 4.2).
"""

import math

import numpy as np
from numba import njit

from planning.choice import ADMITTED, BREAKS, KV_FULL, TTFT, mark_late, why_unattainable
from planning.deadlines import line_due_s, next_due_s, remaining_tokens, todo_tokens
from planning.limits import make_limits
from planning.rollout import OUTLOOK, TOLERANCE_S, rollout
from planning.room import prefill_s
from planning.tables import REQUEST
from routing.mirrors import (
    RESERVED,
    SHARED,
    SHORTEST_S,
    Mirrors,
    advance_mirrors,
    busy_share,
    commit,
    decode_rest_s,
    make_mirrors,
    summarize,
    take_out,
)
from routing.wishes import MOST_LOADED, wish, wishes

NOWHERE = -1  # replica of a placement that failed
OPTIMISM = 1.1  # busy share up to which the screen lets a request through to the replay
NO_WANTS = np.zeros((0, 0))  # preferences where none are said: the rule holds

PLACEMENT = np.dtype(
    [
        ("replica", "i4"),
        ("reason", "i4"),  # planning.admission.REASONS
        ("hops", "i4"),  # replicas that were checked exactly
        ("first_s", "f8"),  # predicted time of the first token
        ("tpot_s", "f8"),
    ]
)


@njit(cache=True)
def group_of(replica_tier: int, tier: int) -> int:
    """Order in which replicas are tried: those of the request's tier, shared ones, tighter tiers from the nearest; -1:
    never, because it is reserved, or a looser tier's iterations are longer than the request's TPOT allows."""
    if replica_tier == tier:
        return 0
    if replica_tier == RESERVED:
        return -1
    if replica_tier == SHARED or tier == SHARED:
        return 1
    return 1 + tier - replica_tier if replica_tier < tier else -1


@njit(cache=True)
def _bearable_s(row: np.void, start_s: float, alone_s: float) -> float:
    """Pace of a newcomer's decodes if its first token comes as soon as can be: the others may be later by that."""
    gaps, pace_s = max(1, remaining_tokens(row) - 1), math.inf if row["best_effort"] else row["tpot_s"]
    if row["ttft_s"] < math.inf:
        pace_s += max(0.0, line_due_s(row, start_s) - start_s - alone_s) / gaps
    return float(min(pace_s, (row["deadline_s"] - start_s - alone_s) / gaps))


@njit(cache=True)
def screen(replica: np.void, coef: np.ndarray, limits: np.void, row: np.void, now_s: float) -> int:
    """What the cached sums say about adding the request: ``ADMITTED`` for possible, or what stands against it.

    Decoding counts as a fluid that every request draws at its own pace. Errs on the side of ``ADMITTED``: a replay has
    the last word, and departures soon make room that the sums do not know of.
    """
    todo, start_s = todo_tokens(row), max(now_s, replica["free_at_s"])
    if replica["held_tokens"] + todo > limits["kv_capacity_tokens"] * (1.0 - limits["kv_headroom"]):
        return KV_FULL
    if replica["count"] - replica["best_effort"] >= limits["max_running"]:
        return TTFT  # it would wait for others to leave, and when they do is a guess
    window_s, alone_s = next_due_s(row, start_s) - start_s, prefill_s(coef, row, limits)
    if window_s < alone_s:
        return TTFT
    own_s = _bearable_s(row, start_s, alone_s)
    step_s = max(SHORTEST_S, min(replica["pace_s"], limits["max_iteration_s"]))  # until its prompt is computed
    token_rate = replica["token_rate"] + 1.0 / max(own_s, SHORTEST_S)
    rest_rate = replica["rest_rate"] + decode_rest_s(coef, row) / max(own_s, SHORTEST_S)
    if busy_share(coef, token_rate, rest_rate, max(SHORTEST_S, min(step_s, own_s))) > OPTIMISM:
        return BREAKS
    free_share = max(0.0, OPTIMISM - busy_share(coef, replica["token_rate"], replica["rest_rate"], step_s))
    return ADMITTED if todo * replica["prompt_token_s"] <= free_share * (window_s + step_s) else TTFT


@njit(cache=True)
def _asks_no_less(row: np.void, refused: np.void) -> bool:
    """Whether the request is in no respect easier to serve than one that was refused."""
    return (
        todo_tokens(row) >= todo_tokens(refused)
        and row["output_tokens"] - row["emitted_tokens"] >= refused["output_tokens"] - refused["emitted_tokens"]
        and row["arrival_s"] + row["ttft_s"] <= refused["arrival_s"] + refused["ttft_s"]
        and row["tpot_s"] <= refused["tpot_s"]
        and row["deadline_s"] <= refused["deadline_s"]
        and row["emitted_tokens"] == 0
    )


@njit(cache=True)
def _bound(mirrors: Mirrors, row: np.void, preference: np.ndarray, rule: int, is_tried: np.ndarray, last: int) -> float:
    """Most that the next replica of the load gradient may be loaded after ``last`` refused: halfway to the emptiest.

    A refusal says little of much emptier replicas and nearly everything of those that are as full. Bisecting finds the
    most loaded replica with room in few checks however large the fleet is.
    """
    if len(preference) or rule != MOST_LOADED or last == NOWHERE:
        return math.inf
    group, least = group_of(mirrors.replicas[last]["tier"], row["tier"]), mirrors.replicas[last]["load"]
    for r in range(len(mirrors.replicas)):
        replica = mirrors.replicas[r]
        if not is_tried[r] and replica["is_open"] and group_of(replica["tier"], row["tier"]) == group:
            least = min(least, replica["load"])
    return 0.5 * (least + mirrors.replicas[last]["load"])


@njit(cache=True)
def _next_candidate(
    mirrors: Mirrors, row: np.void, now_s: float, preference: np.ndarray, rule: int, is_tried: np.ndarray, last: int
) -> tuple[int, int]:
    """Untried replica to check after ``last`` refused: the most wanted of the first group that passes the screen, and
    the last objection. A replica is screened only if it would be preferred to the best so far."""
    best, best_group, best_want, objection = NOWHERE, 0, 0.0, TTFT
    bound = _bound(mirrors, row, preference, rule, is_tried, last)
    last_group = group_of(mirrors.replicas[last]["tier"], row["tier"]) if last != NOWHERE else 0
    for r in range(len(mirrors.replicas)):
        replica = mirrors.replicas[r]
        if is_tried[r] or not replica["is_open"] or replica["count"] >= mirrors.tables.shape[1]:
            continue
        group = group_of(replica["tier"], row["tier"])
        if group < last_group:
            continue
        if len(preference):
            want = preference[r]
        else:
            want = wish(replica, mirrors.cautious[r], mirrors.limits[r], row, now_s, rule)
        if want == -math.inf or (group == last_group and want > bound):
            continue
        if best != NOWHERE and (group > best_group or (group == best_group and want <= best_want)):
            continue
        reason = screen(replica, mirrors.cautious[r], mirrors.limits[r], row, now_s)
        if reason == ADMITTED:
            best, best_group, best_want = r, group, want
        else:
            objection = reason
    return best, objection


@njit(cache=True)
def _replay(mirrors: Mirrors, r: int, row: np.void, now_s: float) -> int:
    """Reason code for the request on replica ``r`` by a replay with it in the next free row."""
    coef, limits, place = mirrors.cautious[r], mirrors.limits[r], mirrors.replicas[r]["count"]
    start_s = max(now_s, mirrors.replicas[r]["free_at_s"])
    mirrors.tables[r, place] = row
    table, outlook = mirrors.tables[r, : place + 1], mirrors.outlooks[r, : place + 1]
    if not mirrors.replicas[r]["is_judged"]:
        mark_late(coef, limits, table, start_s, outlook)
    outlook[place]["doomed"] = False
    worst_s, peak_tokens = rollout(coef, table, start_s, limits, -TOLERANCE_S, outlook)
    return why_unattainable(row, outlook[place], worst_s, peak_tokens, limits)


@njit(cache=True)
def _judge(mirrors: Mirrors, r: int, now_s: float) -> bool:
    """Mark the requests of replica ``r`` that will miss anyway; True when there are any."""
    count, found = mirrors.replicas[r]["count"], False
    outlook = np.zeros(count, dtype=OUTLOOK)
    start_s = max(now_s, mirrors.replicas[r]["free_at_s"])
    rollout(mirrors.cautious[r], mirrors.tables[r, :count], start_s, mirrors.limits[r], -math.inf, outlook)
    for i in range(count):
        mirrors.outlooks[r, i]["doomed"] = outlook[i]["margin_s"] < -TOLERANCE_S
        found |= mirrors.outlooks[r, i]["doomed"]
    mirrors.replicas[r]["is_judged"] = True
    return found


@njit(cache=True)
def check_replica(mirrors: Mirrors, r: int, row: np.void, now_s: float) -> int:
    """Exact reason code for the request on replica ``r``: ``ADMITTED`` when every promise there holds with it."""
    reason = _replay(mirrors, r, row, now_s)
    if reason == BREAKS and not mirrors.replicas[r]["is_judged"] and _judge(mirrors, r, now_s):
        reason = _replay(mirrors, r, row, now_s)
    return reason


@njit(cache=True)
def _rule_out(mirrors: Mirrors, row: np.void, refused: np.ndarray, is_tried: np.ndarray) -> None:
    """Mark replicas that refused an easier request of the same burst: they have only been given more since."""
    for r in range(len(mirrors.replicas)):
        is_tried[r] = refused[r]["prompt_tokens"] > 0 and _asks_no_less(row, refused[r])


@njit(cache=True)
def _place_one(
    mirrors: Mirrors,
    row: np.void,
    now_s: float,
    preference: np.ndarray,
    rule: int,
    max_hops: int,
    refused: np.ndarray,
    placement: np.void,
) -> None:
    """Place one request, or say what stood against it last; ``refused`` (REQUEST[R]) remembers who said no to what."""
    is_tried = np.zeros(len(mirrors.replicas), dtype=np.bool_)
    if len(refused):
        _rule_out(mirrors, row, refused, is_tried)
    placement["replica"], placement["hops"], r = NOWHERE, 0, NOWHERE
    placement["first_s"], placement["tpot_s"] = math.inf, math.inf
    while placement["hops"] < max_hops:
        r, objection = _next_candidate(mirrors, row, now_s, preference, rule, is_tried, r)
        if r == NOWHERE:
            if placement["hops"] == 0:
                placement["reason"] = objection
            return
        is_tried[r] = True
        placement["hops"] += 1
        placement["reason"] = check_replica(mirrors, r, row, now_s)
        if placement["reason"] == ADMITTED:
            seen = mirrors.outlooks[r, mirrors.replicas[r]["count"]]
            placement["replica"], placement["first_s"], placement["tpot_s"] = r, seen["first_s"], seen["tpot_s"]
            commit(mirrors, r, row)
            return
        if len(refused):
            refused[r] = row


@njit(cache=True)
def place(
    mirrors: Mirrors,
    rows: np.ndarray,
    now_s: float,
    preferences: np.ndarray,
    max_hops: int,
    placements: np.ndarray,
    rule: int = MOST_LOADED,
) -> None:
    """Place requests that arrived together (REQUEST[k] to PLACEMENT[k]) and commit what is admitted.

    ``preferences`` (f8[k, R]) says how much each request wants each replica, -inf for never; ``NO_WANTS``: as ``rule``
    says (``routing.wishes``). The shortest prompts go first: in a burst they are the ones that can all be served.
    """
    refused = np.zeros(len(mirrors.replicas) if len(rows) > 1 else 0, dtype=REQUEST)
    for i in np.argsort(rows["prompt_tokens"].copy(), kind="mergesort"):
        preference = preferences[i] if len(preferences) else np.zeros(0)
        _place_one(mirrors, rows[i], now_s, preference, rule, max_hops, refused, placements[i])


def warm_up_placement() -> None:
    """Compile the fleet's kernels at start-up, or load them from the cache."""
    mirrors, rows = make_mirrors(1, 2), np.zeros(1, dtype=REQUEST)
    mirrors.limits[:] = make_limits(kv_capacity_tokens=1024)
    summarize(mirrors, 0)
    advance_mirrors(mirrors, 0.0)
    place(mirrors, rows, 0.0, NO_WANTS, 1, np.zeros(1, dtype=PLACEMENT), MOST_LOADED)
    wishes(mirrors, rows[0], 0.0, MOST_LOADED)
    take_out(mirrors, 0, 1)
