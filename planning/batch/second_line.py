"""The line of those that have no other: late requests and best effort that have waited too long. Pure.

A request with an objective that it can no longer attain gets a second line, ``WAIT_S`` behind its first one and at a
pace at which people read; best effort has such a line from its arrival. Whoever is behind it has a claim on
``BEHIND_SHARE`` of every iteration. The eldest of those that wait longer than ``WAIT_S`` has a claim on room too:
prompts that have not begun leave it what it lacks, and do not preempt it. So everybody goes on in finite time at any
load, the eldest first, unless it needs more than ``LARGEST_SHARE`` of the KV cache. Forecasts count both as soon as
somebody has the claim; what was promised before may come later by that share of the time.
"""

import math

import numpy as np
from numba import njit

from planning.batch.builder import BatchBuilder, chunk_tokens, reserve_with_preemption, take_decodes, tokens_kept_free
from planning.batch.classes import BEST_EFFORT_DECODE, BEST_EFFORT_PREFILL, IDLE, LATE_DECODE, LATE_PREFILL, is_decode
from planning.batch.composition import add_tokens, composition_s
from planning.batch.kv import FREE_KV, FREE_SEQUENCES, blocks_tokens, needed, reserve, wanted_kv_tokens
from planning.deadlines import remaining_tokens
from planning.tables import RequestTable

WAIT_S = 5.0  # that a late first token or one of best effort waits before it has a claim
READING_S = 0.25  # per token: four tokens a second, about three words
BEHIND_SHARE = 0.03  # of every iteration, as long as somebody is behind
LARGEST_SHARE = 0.25  # of the KV cache
NOBODY = -1


@njit(cache=True)
def claims_from_s(row: np.void) -> float:
    """When the request's first token is due by its second line; from then on it may be the eldest with a claim."""
    has_line = row["ttft_s"] < math.inf and not row["best_effort"]
    return row["arrival_s"] + (row["ttft_s"] if has_line else 0.0) + WAIT_S


@njit(cache=True)
def second_due_s(row: np.void) -> float:
    """When the request's next token is due by its second line."""
    has_pace = row["tpot_s"] < math.inf and not row["best_effort"]
    return claims_from_s(row) + row["emitted_tokens"] * max(row["tpot_s"] if has_pace else 0.0, READING_S)


@njit(cache=True)
def room_wanted(row: np.void, limits: np.void) -> int:
    """KV tokens that the request holds or wants, to its predicted end; 0 where that is too much for a claim."""
    block_tokens = limits["block_tokens"]
    wanted = wanted_kv_tokens(row, block_tokens)
    if wanted > LARGEST_SHARE * limits["kv_capacity_tokens"]:
        return 0
    return blocks_tokens(wanted + remaining_tokens(row), block_tokens)


@njit(cache=True)
def old_rows(table: RequestTable, class_of: np.ndarray, now_s: float) -> np.ndarray:
    """Rows of those without a line of their own whose first token was due by their second one (i8[n])."""
    rows, count = np.empty(len(table), dtype=np.int64), 0
    for i in range(len(table)):
        if LATE_DECODE <= class_of[i] < IDLE and claims_from_s(table[i]) < now_s:
            rows[count] = i
            count += 1
    return rows[:count]


@njit(cache=True)
def eldest_row(table: RequestTable, old: np.ndarray, limits: np.void) -> int:
    """The row of ``old`` whose claim is the eldest, ties by id; it keeps it until it ends."""
    eldest = NOBODY
    for i in old:
        if room_wanted(table[i], limits) == 0:
            continue
        own = claims_from_s(table[i]), table[i]["id"]
        if eldest == NOBODY or own < (claims_from_s(table[eldest]), table[eldest]["id"]):
            eldest = i
    return eldest


@njit(cache=True)
def behind_rows(table: RequestTable, old: np.ndarray, eldest: int, now_s: float) -> np.ndarray:
    """Those of ``old`` that are behind their second line: the ``eldest``, then who is furthest behind, ties by id."""
    rows, due_s, count = np.empty(len(old), dtype=np.int64), np.empty(len(old)), 0
    for i in old:
        own_s = second_due_s(table[i])
        if own_s < now_s:
            rows[count], due_s[count] = i, own_s if i != eldest else -math.inf
            count += 1
    rows, due_s = rows[:count], due_s[:count]
    by_id = np.argsort(table["id"][rows], kind="mergesort")
    return rows[by_id[np.argsort(due_s[by_id], kind="mergesort")]]


@njit(cache=True)
def room_kept(builder: BatchBuilder, eldest: int) -> np.ndarray:
    """KV tokens and sequences (i8[2]) of what is free that newcomers leave to the eldest."""
    kept = np.zeros(2, dtype=np.int64)
    if eldest != NOBODY:
        kv_tokens, sequences = needed(builder.table[eldest], 1, builder.engine.limits["block_tokens"])
        kept[FREE_KV] = min(kv_tokens, builder.free[FREE_KV])
        kept[FREE_SEQUENCES] = min(sequences, builder.free[FREE_SEQUENCES])
    return kept


@njit(cache=True)
def take_behind(builder: BatchBuilder, behind: np.ndarray, eldest: int, behind_s: float) -> None:
    """Add those of ``behind`` to the batch, in order, that prolong it by ``behind_s`` together.

    Late requests may take the KV cache of best effort, as always. Best effort that begins takes only what is free and,
    but for the eldest, leaves ``tokens_kept_free``.
    """
    engine, table, composition = builder.engine, builder.table, builder.composition
    limit_s = composition_s(engine.coef, composition) + behind_s
    kept_tokens = tokens_kept_free(builder) if len(behind) > 0 else 0.0
    for i in behind:
        row = table[i]
        if is_decode(row):
            take_decodes(builder, limit_s, BEST_EFFORT_DECODE, np.full(1, i))
            continue
        chunk = chunk_tokens(builder, row, limit_s) if builder.tokens_out[i] == 0 else 0
        begins = builder.class_of[i] == BEST_EFFORT_PREFILL and not row["running"] and i != eldest
        if begins and builder.free[FREE_KV] - needed(row, chunk, engine.limits["block_tokens"])[0] < kept_tokens:
            continue
        if chunk <= 0:
            continue
        has_room = reserve(row, chunk, engine.limits["block_tokens"], builder.free)
        if not has_room and builder.class_of[i] == LATE_PREFILL:
            has_room = reserve_with_preemption(builder, i, chunk, BEST_EFFORT_DECODE)
        if has_room:
            builder.tokens_out[i] = chunk
            add_tokens(row, chunk, composition)
