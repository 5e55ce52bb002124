"""One iteration: which tokens of which request, for how long. One function for the engine, its mirror and its model.

SLOs-Serve algorithm 2 with dynamic size, over DSLO deadlines: the batch is the largest that keeps every running decode
on time, even if it takes longer than predicted by the guard. Decodes that would be late in the next iteration come
first, then prefills by deadline, then early decodes; late and best-effort requests fill what costs no one an SLO.
"""

import math

import numpy as np
from numba import njit

from planning.deadlines import effective_tpot_s, todo_tokens
from planning.mix import add, mix_s, most_on_time_s, remove_decode
from planning.prefill_only import chunk_budget_tokens, chunk_within
from planning.room import (
    DECODE,
    DRAFTS,
    FREE_KV,
    IDLE,
    KV,
    LATE_DECODE,
    LATE_PREFILL,
    PAIRS,
    PREFILL,
    SEQUENCES,
    SPARE_DECODE,
    SPARE_PREFILL,
    TOKENS,
    Draft,
    blocks_tokens,
    is_decode,
    make_room,
    obtainable,
    reserve,
    survey,
)
from planning.tail import TAIL, fill_tail, walk_tail
from profiles.kernels import iteration_s, max_prefill_tokens

# How far the prefills of a kind were served.
ALL_SERVED, OUT_OF_ROOM, OUT_OF_TIME = range(3)


@njit(cache=True)
def _chunk_tokens(coef: np.ndarray, row: np.void, limit_s: float, limits: np.void, draft: Draft) -> int:
    """Largest prefill chunk of the request that keeps the batch within ``limit_s`` and the engine's token limit."""
    mix, todo = draft.mix, todo_tokens(row)
    room = max_prefill_tokens(
        coef, limit_s, mix[TOKENS], mix[KV], mix[PAIRS], mix[SEQUENCES], mix[DRAFTS], row["computed_tokens"]
    )
    chunk = chunk_within(todo, int(mix[TOKENS]), draft.chunk_budget)
    return min(todo, chunk, room, int(limits["max_batch_tokens"] - mix[TOKENS]))


@njit(cache=True)
def _by_work(table: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Rows by work to do, then by id. O(n log n): both sorts are stable."""
    by_id = rows[np.argsort(table["id"][rows], kind="mergesort")]
    todo = np.empty(len(rows), dtype=np.int64)
    for k in range(len(rows)):
        todo[k] = todo_tokens(table[by_id[k]])
    return by_id[np.argsort(todo, kind="mergesort")]


@njit(cache=True)
def _by_slack(table: np.ndarray, draft: Draft, kind: int) -> np.ndarray:
    """Rows of one kind, least slack first; ties by work to do, then by id, so that table order decides nothing."""
    rows = _rows_of(draft, kind)
    rows = rows[np.argsort(draft.slack_s[rows], kind="mergesort")] if len(rows) > 1 else rows
    first = 0
    for end in range(1, len(rows) + 1):
        if end < len(rows) and draft.slack_s[rows[end]] == draft.slack_s[rows[first]]:
            continue
        if end - first > 1:  # all that is best effort ties at infinity
            rows[first:end] = _by_work(table, rows[first:end])
        first = end
    return rows


@njit(cache=True)
def _rows_of(draft: Draft, kind: int) -> np.ndarray:
    """Rows of one kind in table order."""
    rows, count = np.empty(draft.counts[kind], dtype=np.int64), 0
    for i in range(len(draft.kind)):
        if draft.kind[i] == kind:
            rows[count] = i
            count += 1
    return rows


@njit(cache=True)
def _take_decodes(
    coef: np.ndarray, table: np.ndarray, limits: np.void, limit_s: float, rank: int, rows: np.ndarray, draft: Draft
) -> None:
    """Add those of the decodes ``rows`` that are not in the batch, in order, until one no longer fits ``limit_s``.

    The first decode of a batch is taken whatever it costs: nothing shorter would serve it.
    """
    mix = draft.mix
    for i in rows:
        row = table[i]
        if draft.tokens_out[i] != 0:
            continue
        tokens = 1 + row["spec_tokens"]
        drafts, is_first = mix[DRAFTS], mix[TOKENS] == 0
        add(row, tokens, mix)
        is_over = mix[TOKENS] > limits["max_batch_tokens"] or mix_s(coef, mix) > limit_s
        if is_over and not is_first:
            remove_decode(row, tokens, drafts, mix)
            return
        if reserve(row, tokens, limits["block_tokens"], draft.free):
            draft.tokens_out[i] = tokens
        elif rank == IDLE or not make_room(table, i, tokens, rank, limits["block_tokens"], draft):
            remove_decode(row, tokens, drafts, mix)


@njit(cache=True)
def _take_prefills(
    coef: np.ndarray, table: np.ndarray, limits: np.void, limit_s: float, rank: int, kind: int, draft: Draft
) -> tuple[float, int]:
    """Add prefill chunks of one kind by deadline; returns the iteration's limit after it and how far they were served.

    A first token must not wait for what is placed behind it beyond its own deadline less the guard: the limit falls to
    that.
    """
    mix, served, block_tokens = draft.mix, ALL_SERVED, limits["block_tokens"]
    most = draft.free[:0]  # what preemption could yield; empty: not known
    for i in _by_slack(table, draft, kind):
        row = table[i]
        if draft.tokens_out[i] != 0:
            continue
        chunk = _chunk_tokens(coef, row, limit_s, limits, draft)
        if chunk <= 0:
            return limit_s, OUT_OF_TIME
        has_room = reserve(row, chunk, block_tokens, draft.free)
        if not has_room and len(most) == 0:
            most = obtainable(table, rank, block_tokens, draft)
        if len(most) > 0 and not reserve(row, chunk, block_tokens, most):
            served = OUT_OF_ROOM
            continue
        if not has_room:
            make_room(table, i, chunk, rank, block_tokens, draft)
        draft.tokens_out[i] = chunk
        add(row, chunk, mix)
        if chunk < todo_tokens(row):
            return limit_s, OUT_OF_TIME
        if kind == PREFILL:
            limit_s = min(limit_s, max(draft.slack_s[i] / (1.0 + limits["guard"]), mix_s(coef, mix)))
    return limit_s, served


@njit(cache=True)
def _future_margin_s(coef: np.ndarray, table: np.ndarray, now_s: float, limits: np.void, draft: Draft) -> float:
    """By how much this batch may be prolonged without ever costing an attainable request its SLO.

    Requests are looked at as they will be after the batch; the rest of their decoding runs in lockstep.
    """
    end_s = now_s + mix_s(coef, draft.mix)
    tails = np.zeros(len(table), dtype=TAIL)
    count, margin_s = 0, math.inf
    for i in range(len(table)):
        kind, row = draft.kind[i], table[i]
        if kind > PREFILL or (kind == PREFILL and draft.tokens_out[i] == 0):
            continue
        tail = tails[count]
        fill_tail(tail, row, end_s, limits["acceptance"])
        if kind == PREFILL:
            tail["kv_tokens"] += todo_tokens(row) - 1
        if draft.tokens_out[i] > 0:
            margin_s = min(margin_s, tail["due_s"] - end_s)
            tail["due_s"] += tail["pace_s"] if kind == DECODE else row["tpot_s"]
            tail["kv_tokens"] += tail["gain"]
            tail["steps"] -= 1
        if tail["steps"] > 0:
            count += 1
        else:
            margin_s = min(margin_s, tail["deadline_s"] - end_s)
    worst_s, _peak, _first = walk_tail(coef, tails[:count], end_s, limits["block_tokens"])
    return min(margin_s, worst_s)


@njit(cache=True)
def _take_due_decodes(coef: np.ndarray, table: np.ndarray, now_s: float, limits: np.void, draft: Draft) -> float:
    """Add the decodes that cannot wait for the next iteration; returns how long this one may last.

    That is the least slack of any running decode, less the guard: were the iteration ``guard`` times longer than it is
    predicted, nobody would be late. Where not even all decodes fit into that they run alone and so earn slack. A decode
    can wait when, with the same guard, it would not cut the next iteration below the tightest pace: decodes that fall
    due one after the other leave prefills nothing but slivers, those that run together leave them whole iterations.
    None has to wait when no prefill wants the time.
    """
    everyone, least_s, pace_s, stretch = np.zeros(5), math.inf, limits["max_iteration_s"], 1.0 + limits["guard"]
    for i in range(len(table)):
        if draft.kind[i] == DECODE:
            add(table[i], 1 + table[i]["spec_tokens"], everyone)
            least_s = min(least_s, draft.slack_s[i])
            pace_s = min(pace_s, effective_tpot_s(table[i], now_s))
    all_s = mix_s(coef, everyone)
    limit_s = min(limits["max_iteration_s"], max(least_s / stretch, min(least_s, all_s)))
    horizon_s = stretch * (limit_s + max(all_s, pace_s)) if draft.counts[PREFILL] > 0 else math.inf
    has_room = draft.free[FREE_KV] >= draft.counts[DECODE] * limits["block_tokens"] + everyone[TOKENS]
    fits = has_room and all_s <= limit_s and everyone[TOKENS] <= limits["max_batch_tokens"]
    rows = _rows_of(draft, DECODE) if fits else _by_slack(table, draft, DECODE)
    if all_s > limit_s and has_room and len(rows) > 1:
        limit_s = min(limits["max_iteration_s"], most_on_time_s(coef, table, draft.slack_s[rows], rows, limit_s, all_s))
        horizon_s = max(horizon_s, limit_s + all_s)
    due = rows[draft.slack_s[rows] < horizon_s] if horizon_s < math.inf else rows
    _take_decodes(coef, table, limits, limit_s, LATE_DECODE, due, draft)
    return limit_s


@njit(cache=True)
def _fill(
    coef: np.ndarray,
    table: np.ndarray,
    now_s: float,
    limits: np.void,
    limit_s: float,
    share_s: float,
    is_served: bool,
    draft: Draft,
) -> None:
    """Late and best-effort work in what is left: it may not cost an attainable request its SLO, now or later.

    Nor may it make newcomers wait: decodes prolong the iteration by ``limits["filler"]`` of an empty one, prefills only
    an iteration that is not longer than that beyond an empty one. Only ``share_s`` is theirs in any case, and all there
    is while attainable prefills are not all served.
    """
    used_s, empty_s = mix_s(coef, draft.mix), iteration_s(coef, 1.0, 0.0, 0.0, 1.0, 0.0)
    margin_s = _future_margin_s(coef, table, now_s, limits, draft) if is_served else 0.0
    margin_s = max(0.0, (margin_s - limits["guard"] * used_s) / (1.0 + limits["guard"]))
    limit_s = min(limit_s + share_s, used_s + max(share_s, margin_s))
    filler_s = limits["filler"] * empty_s
    decode_limit_s = min(limit_s, max(used_s, empty_s) + max(share_s, filler_s))
    _take_decodes(coef, table, limits, decode_limit_s, SPARE_DECODE, _by_slack(table, draft, LATE_DECODE), draft)
    pace_s = math.inf
    for i in range(len(table)):
        if draft.kind[i] == LATE_DECODE and draft.tokens_out[i] > 0:
            pace_s = min(pace_s, effective_tpot_s(table[i], now_s))
    # Late decodes keep their pace as far as prefills beside them still get half of the iteration.
    limit_s = min(limit_s, max(pace_s, 2 * mix_s(coef, draft.mix)), max(empty_s + filler_s, used_s + share_s))
    _limit_s, served = _take_prefills(coef, table, limits, limit_s, SPARE_DECODE, LATE_PREFILL, draft)
    _take_decodes(coef, table, limits, decode_limit_s, IDLE, _rows_of(draft, SPARE_DECODE), draft)
    if served == ALL_SERVED:
        _take_prefills(coef, table, limits, limit_s, IDLE, SPARE_PREFILL, draft)


@njit(cache=True)
def _force_one(coef: np.ndarray, table: np.ndarray, limits: np.void, draft: Draft) -> None:
    """Some request always makes progress: the most entitled one that fits the KV cache, whoever has to yield."""
    leader = -1
    for i in range(len(table)):
        kv_tokens = blocks_tokens(table[i]["computed_tokens"] + todo_tokens(table[i]), limits["block_tokens"])
        if draft.kind[i] == IDLE or kv_tokens > limits["kv_capacity_tokens"]:
            continue
        if leader < 0 or (draft.kind[i], draft.slack_s[i]) < (draft.kind[leader], draft.slack_s[leader]):
            leader = i
    if leader < 0:
        return
    row = table[leader]
    tokens = 1 + row["spec_tokens"]
    if not is_decode(row):
        tokens = max(1, _chunk_tokens(coef, row, limits["max_iteration_s"], limits, draft))
    if make_room(table, leader, tokens, DECODE, limits["block_tokens"], draft):
        add(row, tokens, draft.mix)


@njit(cache=True)
def form_batch(
    coef: np.ndarray, table: np.ndarray, now_s: float, limits: np.void, tokens_out: np.ndarray
) -> tuple[float, np.ndarray]:
    """Fill ``tokens_out`` (i4[rows]) with the tokens each request runs in the iteration that starts at ``now_s``.

    0: not in this batch; ``PREEMPT``: loses its KV cache to a more entitled one. A running request with one token to
    do runs that and its drafts. Returns the predicted seconds and the composition, f8[5]: tokens, KV tokens read by
    decodes, attention pairs, sequences, draft tokens (SLOs-Serve algorithm 2, PolyServe section 4.5). O(n log n).
    """
    rows = len(table)
    count = np.zeros(IDLE + 1, np.int64)
    budget = chunk_budget_tokens(table, limits)
    free, mix = np.zeros(2, np.int64), np.zeros(5)
    draft = Draft(np.empty(rows, np.int64), count, np.empty(rows), free, mix, tokens_out, budget)
    survey(coef, table, now_s, limits, draft)
    limit_s = _take_due_decodes(coef, table, now_s, limits, draft)
    has_spare, has_late = count[SPARE_DECODE] + count[SPARE_PREFILL] > 0, count[LATE_DECODE] + count[LATE_PREFILL] > 0
    share_s = limit_s * limits["best_effort_share"] if has_spare else 0.0
    limit_s, served = _take_prefills(coef, table, limits, limit_s - share_s, LATE_DECODE, PREFILL, draft)
    if served != OUT_OF_TIME and count[PREFILL] > 0:
        _take_decodes(coef, table, limits, limit_s, LATE_DECODE, _by_slack(table, draft, DECODE), draft)
    if has_spare or has_late:
        _fill(coef, table, now_s, limits, limit_s, share_s, served == ALL_SERVED, draft)
    if draft.mix[TOKENS] == 0 and count[IDLE] < rows:
        _force_one(coef, table, limits, draft)
    return mix_s(coef, draft.mix), draft.mix
