"""When a refused request would fit, and whom it is kept for: a fluid ledger of every replica's next half minute.

Reservations as in conservative backfilling of batch systems (Mu'alem and Feitelson 2001): whoever is refused is told
the first second at which the ledger has room for it. That room is reserved, and newcomers are admitted only where they
leave it free. Work is a fluid here, by the same sums as ``routing.quick_check.quick_check``; what a replica
can really promise is checked exactly when the request comes.
"""

import math
from typing import NamedTuple

import numpy as np
from numba import boolean, float64, int64, intp, njit, typeof, types

from planning.batch.classes import decode_s, decode_step_s
from planning.batch.speculation import promised_step
from planning.deadlines import effective_tpot_s, next_token_deadline_s, num_uncomputed_tokens, remaining_tokens
from planning.forecast.lockstep import accepted_tokens
from planning.forecast.rollout import TOLERANCE_S
from planning.order import order_of, order_of_integers
from planning.tables import ROW_TYPE
from profiles.compiled_once import compiled_once
from profiles.kernels import attention_pairs, attention_s
from routing.fleet_state import (
    FLEET_TYPE,
    SHORTEST_S,
    FleetState,
    decode_rest_s,
    engine_of,
    max_pace_s,
    utilization,
)
from routing.placement import NOWHERE, tier_distance

BUCKET_S = 0.25
HORIZON = 124  # buckets that are looked ahead
BUCKETS = 256  # of the ring: a time's bucket is its number modulo this
PER_S = 4  # buckets
# What a request takes of a replica while it is there; the last, of its prompt, when it comes.
TOKEN_RATE, REST_RATE, KV, SEQUENCES, PREFILL = range(5)
COLUMNS = 5
LONGEST_STEP_S = 1e3  # paces above, such as none at all, count as this
LEAST_FREE = 0.02  # part of the time that prompts get, however many decodes there are
LEAST_EXPECTED = 0.5  # requests that are told to be there, from which on newcomers leave room for them
FULL = 0.95  # utilization up to which room is told; a replica attains a little less than a fluid


class Ledger(NamedTuple):
    """Both by replica and bucket of time."""

    carried: np.ndarray  # f8[R, BUCKETS, COLUMNS], what is promised; PREFILL in the present bucket only
    reserved: np.ndarray  # f8[R, BUCKETS, COLUMNS], what was told to come back
    share: float = 1.0  # of that, which is taken to come


def make_ledger(replicas: int) -> Ledger:
    """Nothing promised, nothing told."""
    shape = (replicas, BUCKETS, COLUMNS)
    return Ledger(np.zeros(shape), np.zeros(shape), 1.0)


LEDGER_TYPE = typeof(make_ledger(1))  # as kernels see it


def resized_ledger(ledger: Ledger, replicas: int) -> Ledger:
    """A copy with room for more replicas."""
    larger = make_ledger(replicas)
    larger.carried[: len(ledger.carried)], larger.reserved[: len(ledger.reserved)] = ledger.carried, ledger.reserved
    return larger


@njit(cache=True)
def bucket_of(at_s: float) -> int:
    """The number of a time's bucket, before it is taken modulo the ring's length."""
    return int(at_s / BUCKET_S)


@njit(cache=True)
def carry(fleet: FleetState, now_s: float, ledger: Ledger, slots: np.ndarray) -> None:
    """Enter what the open ones of these replicas (i8[k]) have promised, until each request's predicted end."""
    first, carried = bucket_of(now_s), ledger.carried
    changes, amounts = np.zeros((HORIZON + 1, COLUMNS)), np.zeros(COLUMNS)
    for r in slots:
        replica, coef = fleet.replicas[r], fleet.pessimistic_coefs[r]
        if not replica["is_open"]:
            continue
        changes[:] = 0.0
        start_s, waits_s = max(now_s, replica["free_at_s"]), 0.0
        for i in range(replica["count"]):
            row = fleet.tables[r, i]
            todo = num_uncomputed_tokens(row)
            if row["best_effort"] or todo <= 0:
                continue
            gain = accepted_tokens(row["spec_tokens"], fleet.limits[r]["acceptance"])
            pace_s = max(max_pace_s(row, start_s) * gain, decode_s(coef, row), SHORTEST_S)  # of a step
            waits_s += todo * replica["prompt_token_s"] if todo > 1 else 0.0
            step_s = max(replica["step_s"], min(1.0, replica["load"]) * pace_s)
            lasts_s = start_s - now_s + remaining_tokens(row) / gain * min(step_s, LONGEST_STEP_S)
            end = min(HORIZON, 1 + int(lasts_s / BUCKET_S))
            amounts[TOKEN_RATE] = (1.0 + row["spec_tokens"]) / pace_s
            amounts[REST_RATE] = decode_rest_s(coef, row) / pace_s
            amounts[KV], amounts[SEQUENCES] = row["prompt_tokens"] + row["output_tokens"], 1.0
            for column in range(PREFILL):
                changes[0, column] += amounts[column]
                changes[end, column] -= amounts[column]
        for j in range(HORIZON):
            at = (first + j) % BUCKETS
            for column in range(PREFILL):
                before = carried[r, (at - 1) % BUCKETS, column] if j > 0 else 0.0
                carried[r, at, column] = before + changes[j, column]
            carried[r, at, PREFILL] = waits_s if j == 0 else 0.0
        for j in range(HORIZON, BUCKETS):  # these hold what was promised until now, one turn of the ring ago
            carried[r, (first + j) % BUCKETS, :] = 0.0


class Claim(NamedTuple):
    """What a request would take of a replica."""

    terms: np.ndarray  # f8[COLUMNS]
    lasts: int  # buckets for which it holds all but its prompt
    window_s: float  # that its first token may take
    step_s: float  # that its pace leaves to an iteration; inf where it is only prefilled
    is_new: bool  # a newcomer, which is checked exactly; otherwise it was told to come back


CLAIM_TYPE = types.NamedTuple((float64[::1], int64, float64, float64, boolean), Claim)


@compiled_once(CLAIM_TYPE(FLEET_TYPE, intp, ROW_TYPE, float64, boolean))
def claim_of(fleet: FleetState, r: int, row: np.void, now_s: float, is_new: bool) -> Claim:
    """What the request would take of replica ``r``, as if it arrived now."""
    coef, todo = fleet.pessimistic_coefs[r], num_uncomputed_tokens(row)
    step_tokens, gain = promised_step(
        engine_of(fleet, r), row, now_s, fleet.replicas[r]["decodes"], fleet.replicas[r]["decode_kv_tokens"]
    )
    pace_s = max(effective_tpot_s(row, now_s) * gain, decode_step_s(coef, row, step_tokens), SHORTEST_S)  # of a step
    terms = np.empty(COLUMNS)
    terms[TOKEN_RATE], terms[REST_RATE] = step_tokens / pace_s, decode_rest_s(coef, row) / pace_s
    terms[KV], terms[SEQUENCES] = row["prompt_tokens"] + row["output_tokens"], 1.0
    pairs = attention_pairs(todo, row["computed_tokens"])
    terms[PREFILL] = todo * fleet.replicas[r]["prompt_token_s"] + attention_s(coef, pairs)
    lasts = int(min(float(HORIZON), remaining_tokens(row) / gain * min(pace_s, LONGEST_STEP_S) / BUCKET_S)) + 1
    return Claim(terms, lasts, next_token_deadline_s(row, now_s) - now_s, pace_s, is_new)


@njit(cache=True)
def add_claim(reserved: np.ndarray, r: int, bucket: int, terms: np.ndarray, lasts: int, sign: float) -> None:
    """Enter a claim that begins in ``bucket`` (``sign`` 1), or take it out again (-1)."""
    reserved[r, bucket % BUCKETS, PREFILL] += sign * terms[PREFILL]
    for j in range(bucket, bucket + min(lasts, HORIZON)):
        for column in range(PREFILL):
            reserved[r, j % BUCKETS, column] += sign * terms[column]


@njit(cache=True, inline="always")
def _taken(ledger: Ledger, r: int, at: int, column: int) -> float:
    """What of a bucket is promised, or told and likely to come."""
    return ledger.carried[r, at, column] + ledger.share * ledger.reserved[r, at, column]


@njit(cache=True)
def _is_full(fleet: FleetState, ledger: Ledger, r: int, at: int, claim: np.ndarray, step_s: float) -> bool:
    """Whether the claim is too much for a bucket beside what is promised and reserved.

    Nothing is too much for an idle replica: whoever asks here could be served by one (``at_best``).
    """
    sequences = _taken(ledger, r, at, SEQUENCES)
    if sequences < TOLERANCE_S:
        return False
    token_rate = _taken(ledger, r, at, TOKEN_RATE) + claim[TOKEN_RATE]
    rest_rate = _taken(ledger, r, at, REST_RATE) + claim[REST_RATE]
    return (
        utilization(fleet.pessimistic_coefs[r], token_rate, rest_rate, step_s) > FULL
        or _taken(ledger, r, at, KV) + claim[KV] > fleet.replicas[r]["usable_tokens"]
        or sequences + claim[SEQUENCES] > fleet.limits[r]["max_running"]
    )


@compiled_once(float64(FLEET_TYPE, LEDGER_TYPE, intp, int64, float64))
def _free_share(fleet: FleetState, ledger: Ledger, r: int, at: int, step_s: float) -> float:
    """Part of a bucket's time that decodes leave to prompts."""
    if _taken(ledger, r, at, SEQUENCES) < TOLERANCE_S:
        return 1.0
    token_rate, rest_rate = _taken(ledger, r, at, TOKEN_RATE), _taken(ledger, r, at, REST_RATE)
    return max(LEAST_FREE, 1.0 - utilization(fleet.pessimistic_coefs[r], token_rate, rest_rate, step_s))


@njit(cache=True)
def _step_s(fleet: FleetState, r: int, claim_s: float) -> float:
    """Iterations as long as the tightest, the newcomer included, can bear."""
    return max(SHORTEST_S, min(fleet.replicas[r]["pace_s"], fleet.limits[r]["max_iteration_s"], claim_s))


@compiled_once(boolean(FLEET_TYPE, LEDGER_TYPE, intp, int64, float64, CLAIM_TYPE))
def _fits_at(
    fleet: FleetState,
    ledger: Ledger,
    r: int,
    begins: int,
    queue_s: float,
    claim: Claim,
) -> bool:
    """Whether replica ``r`` has room from bucket ``begins`` on, with ``queue_s`` of prompts ahead then, so that all
    that was told keeps its own. Of a newcomer (``claim.is_new``) only the latter is asked: it is checked exactly."""
    terms, lasts, window_s, is_new = claim.terms, claim.lasts, claim.window_s, claim.is_new
    step_s, first = _step_s(fleet, r, claim.step_s), begins
    for j in range(HORIZON):
        at = (first + j) % BUCKETS
        comes_s, expected = (
            ledger.share * ledger.reserved[r, at, PREFILL],
            ledger.share * ledger.reserved[r, at, SEQUENCES],
        )
        is_asked = expected >= LEAST_EXPECTED if is_new else True
        if j < lasts and is_asked and _is_full(fleet, ledger, r, at, terms, step_s):
            return False
        if j >= lasts and queue_s <= 0.0:
            return True
        queue_s += comes_s + (terms[PREFILL] if j == 0 else 0.0)
        if queue_s <= 0.0 and j > 0:  # no prompt waits: how fast prompts are computed does not matter
            queue_s = 0.0
            continue
        free = _free_share(fleet, ledger, r, at, step_s)
        prompts_come = comes_s > TOLERANCE_S or (j == 0 and not is_new)
        if prompts_come and is_asked and queue_s > window_s * free:
            return False
        queue_s = max(0.0, queue_s - free * BUCKET_S)
    return True


@njit(cache=True)
def is_kept(fleet: FleetState, ledger: Ledger, row: np.void, now_s: float, slots: np.ndarray) -> np.ndarray:
    """Of each of these replicas (i8[k]), whether a newcomer there would take what is reserved for others (bool[k])."""
    kept, first = np.zeros(len(slots), dtype=np.bool_), bucket_of(now_s)
    for i in range(len(slots)):
        if fleet.replicas[slots[i]]["is_open"]:
            claim = claim_of(fleet, slots[i], row, now_s, True)
            queue_s = ledger.carried[slots[i], first % BUCKETS, PREFILL]
            kept[i] = not _fits_at(fleet, ledger, slots[i], first, queue_s, claim)
    return kept


@njit(cache=True)
def emptiest(fleet: FleetState, tier: int, most: int) -> np.ndarray:
    """The ``most`` least loaded of the open replicas that the tier may use, in order of slots (i8[k])."""
    slots, count = np.empty(len(fleet.replicas), dtype=np.int64), 0
    for r in range(len(fleet.replicas)):
        if fleet.replicas[r]["is_open"] and tier_distance(fleet.replicas[r]["tier"], tier) >= 0:
            slots[count] = r
            count += 1
    if count <= most:
        return slots[:count]
    loads = np.empty(count)
    for i in range(count):
        loads[i] = fleet.replicas[slots[i]]["load"]
    least = order_of(loads)[:most]
    return slots[least[order_of_integers(least)]]


@njit(cache=True)
def first_room(
    fleet: FleetState, ledger: Ledger, row: np.void, now_s: float, most_s: int, slots: np.ndarray
) -> tuple[int, int]:
    """Whole seconds from now, 1 to ``most_s``, until one of these replicas (i8[k]) has room for the request, and which;
    the one with the least to do then. 0 and ``NOWHERE`` where there is none in time."""
    first, best, least, count = bucket_of(now_s), NOWHERE, math.inf, len(slots)
    terms, lasts, windows_s = np.empty((count, COLUMNS)), np.empty(count, dtype=np.int64), np.empty(count)
    queues_s, steps_s, claims_s = np.empty(count), np.empty(count), np.empty(count)
    for i in range(count):
        claim = claim_of(fleet, slots[i], row, now_s, False)
        terms[i], lasts[i], windows_s[i] = claim.terms, claim.lasts, claim.window_s
        queues_s[i] = ledger.carried[slots[i], first % BUCKETS, PREFILL]
        steps_s[i], claims_s[i] = _step_s(fleet, slots[i], claim.step_s), claim.step_s
    for second in range(1, most_s + 1):
        begins = first + second * PER_S
        for i in range(count):
            r = slots[i]
            for j in range(begins - PER_S, begins):
                queue_s = queues_s[i] + ledger.share * ledger.reserved[r, j % BUCKETS, PREFILL]
                free = _free_share(fleet, ledger, r, j % BUCKETS, steps_s[i]) if queue_s > 0.0 else 1.0
                queues_s[i] = max(0.0, queue_s - free * BUCKET_S)
            claim = Claim(terms[i], lasts[i], windows_s[i], claims_s[i], False)
            if _fits_at(fleet, ledger, r, begins, queues_s[i], claim):
                busy = -_free_share(fleet, ledger, r, begins % BUCKETS, steps_s[i])
                if busy < least:
                    best, least = r, busy
        if best != NOWHERE:
            return second, best
    return 0, NOWHERE
