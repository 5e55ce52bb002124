"""One iteration: which tokens of which request, and how long it takes. Engine, controller and simulator share it.

SLOs-Serve algorithm 2 with dynamic size, over DSLO deadlines: the batch is the largest that keeps every running decode
on time, even if it takes longer than predicted by the slack margin. Decodes that would be late in the next iteration
come first, then prefills by deadline, then early decodes; late and best-effort requests fill what costs no one an SLO.
"""

import math

import numpy as np
from numba import boolean, float64, njit, types

from planning.batch.builder import (
    BUILDER_TYPE,
    BatchBuilder,
    best_effort_share,
    by_slack,
    classify_requests,
    reserve_with_preemption,
    rows_of,
)
from planning.batch.classes import (
    BEST_EFFORT_DECODE,
    BEST_EFFORT_PREFILL,
    DECODE,
    IDLE,
    LATE_DECODE,
    LATE_PREFILL,
    PREFILL,
    is_decode,
)
from planning.batch.composition import (
    TOKENS,
    add_tokens,
    composition_s,
    most_on_time_s,
)
from planning.batch.kv import FREE_KV, blocks_tokens
from planning.batch.policy import policy
from planning.batch.prefill_only import chunk_budget_tokens
from planning.batch.taking import ALL_SERVED, OUT_OF_ROOM, OUT_OF_TIME, chunk_tokens, take_decodes, take_prefills
from planning.deadlines import effective_tpot_s, num_uncomputed_tokens
from planning.engine import EngineModel
from planning.forecast.lockstep import DECODE_STATE, fill_decode_state, run_lockstep
from planning.tables import RequestTable
from profiles.compiled_once import compiled_once
from profiles.kernels import iteration_s

LEAST_STRETCH = 0.5  # of an empty iteration, that late and best-effort work may add however tight a TTFT is


@compiled_once(float64(BUILDER_TYPE))
def _future_margin_s(builder: BatchBuilder) -> float:
    """By how much this batch may be prolonged without ever costing an attainable request its SLO.

    Requests are looked at as they will be after the batch; the rest of their decoding runs in lockstep.
    """
    engine, table, class_of, tokens_out = builder.engine, builder.table, builder.class_of, builder.tokens_out
    end_s = builder.now_s + composition_s(engine.coef, builder.composition)
    decodes = np.zeros(len(table), dtype=DECODE_STATE)
    count, margin_s = 0, math.inf
    for i in range(len(table)):
        request_class, row = class_of[i], table[i]
        if request_class > PREFILL or (request_class == PREFILL and tokens_out[i] == 0):
            continue
        decode = decodes[count]
        fill_decode_state(decode, row, end_s, engine.limits["acceptance"])
        if request_class == PREFILL:
            decode["kv_tokens"] += num_uncomputed_tokens(row) - 1
        if tokens_out[i] > 0:
            margin_s = min(margin_s, decode["due_s"] - end_s)
            decode["due_s"] += decode["pace_s"] if request_class == DECODE else row["tpot_s"]
            decode["kv_tokens"] += decode["gain"]
            decode["steps"] -= 1
        if decode["steps"] > 0:
            count += 1
        else:
            margin_s = min(margin_s, decode["deadline_s"] - end_s)
    slower = engine.coef / (1.0 - engine.limits["best_effort_share"])  # as forecasts have it
    worst_s, _peak, _first = run_lockstep(slower, decodes[:count], end_s, engine.limits["block_tokens"])
    return min(margin_s, worst_s)


@njit(cache=True)
def _take_due_decodes(builder: BatchBuilder) -> float:
    """Add the decodes that cannot wait for the next iteration; returns how long this one may last.

    The limit is the least slack of any running decode, less the slack margin: an iteration that takes ``slack_margin``
    times longer than predicted makes no request late. Where not all decodes fit into this limit, they run without
    prefills and so earn slack.

    A decode waits if the next iteration, with the same margin, would still be as long as the tightest pace allows.
    Decodes that run together leave whole iterations to prefills; decodes that fall due one by one leave them fragments.
    Without a prefill no decode waits.
    """
    engine, table, now_s = builder.engine, builder.table, builder.now_s
    all_decodes, least_s, pace_s = np.zeros(5), math.inf, engine.limits["max_iteration_s"]
    stretch, class_of, slack_s = 1.0 + engine.limits["slack_margin"], builder.class_of, builder.slack_s
    for i in range(len(table)):
        if class_of[i] == DECODE:
            add_tokens(table[i], 1 + table[i]["spec_tokens"], all_decodes)
            least_s = min(least_s, slack_s[i])
            pace_s = min(pace_s, effective_tpot_s(table[i], now_s))
    all_s = composition_s(engine.coef, all_decodes)
    limit_s = min(engine.limits["max_iteration_s"], max(least_s / stretch, min(least_s, all_s)))
    horizon_s = stretch * (limit_s + max(all_s, pace_s)) if builder.counts[PREFILL] > 0 else math.inf
    has_room = builder.free[FREE_KV] >= builder.counts[DECODE] * engine.limits["block_tokens"] + all_decodes[TOKENS]
    fits = has_room and all_s <= limit_s and all_decodes[TOKENS] <= engine.limits["max_batch_tokens"]
    rows = rows_of(builder, DECODE) if fits else by_slack(builder, DECODE)
    if all_s > limit_s and has_room and len(rows) > 1:
        limit_s = min(
            engine.limits["max_iteration_s"],
            most_on_time_s(engine.coef, table, builder.slack_s[rows], rows, limit_s, all_s),
        )
        horizon_s = max(horizon_s, limit_s + all_s)
    due = rows[builder.slack_s[rows] < horizon_s] if horizon_s < math.inf else rows
    take_decodes(builder, limit_s, LATE_DECODE, due)
    return limit_s


@njit(cache=True)
def _stretch_s(builder: BatchBuilder, used_s: float, empty_s: float) -> float:
    """How far late and best-effort work may go beyond an empty iteration: ``limits["best_effort_stretch"]`` of one, as
    far as the iteration keeps to ``newcomer_share`` of the tightest TTFT here. Whoever comes may ask for as much."""
    limits, tightest_s = builder.engine.limits, math.inf
    for i in range(len(builder.table)):
        row = builder.table[i]
        if not row["best_effort"] and 0.0 < row["ttft_s"] < tightest_s:
            tightest_s = row["ttft_s"]
    waited, most_s = 1.0 / limits["newcomer_share"], limits["newcomer_share"] * tightest_s
    if limits["lead_s"] < math.inf:  # they wait for a part of one more, which was formed just before
        most_s = max((tightest_s - limits["lead_s"]) / (waited + limits["lead_share"]), tightest_s / (waited + 1.0))
    return min(limits["best_effort_stretch"] * empty_s, max(LEAST_STRETCH * empty_s, most_s - max(used_s, empty_s)))


@njit(cache=True)
def _first_tokens_s(builder: BatchBuilder) -> float:
    """How long the iteration may last for the first tokens in it that are to come in time, less the slack margin."""
    least_s = math.inf
    for i in range(len(builder.table)):
        if builder.class_of[i] == PREFILL and builder.tokens_out[i] >= num_uncomputed_tokens(builder.table[i]):
            least_s = min(least_s, builder.slack_s[i])
    return least_s / (1.0 + builder.engine.limits["slack_margin"])


@compiled_once(types.void(BUILDER_TYPE, float64, float64, boolean))
def _add_late_and_best_effort(builder: BatchBuilder, limit_s: float, best_effort_s: float, is_served: bool) -> None:
    """Late and best-effort work in what is left: it may not cost an attainable request its SLO, now or later.

    Nor may it make newcomers wait: decodes prolong the iteration by ``limits["best_effort_stretch"]`` of an empty one,
    prefills only an iteration that is not longer than that beyond an empty one. In any case they may prolong what
    the others take by the share that forecasts leave them, within ``best_effort_s``; that is all there is while
    attainable prefills are not all served. Beside a late prompt that lacks KV cache, prompts of best effort prolong an
    iteration by ``LEAST_STRETCH`` of an empty one.
    """
    engine, table, now_s = builder.engine, builder.table, builder.now_s
    used_s, empty_s = composition_s(engine.coef, builder.composition), iteration_s(engine.coef, 1.0, 0.0, 0.0, 1.0, 0.0)
    margin_s = _future_margin_s(builder) if is_served else 0.0
    margin_s = max(0.0, (margin_s - engine.limits["slack_margin"] * used_s) / (1.0 + engine.limits["slack_margin"]))
    share = engine.limits["best_effort_share"]
    kept_s = min(best_effort_s, used_s * share / (1.0 - share))
    limit_s = min(limit_s + best_effort_s, used_s + max(kept_s, margin_s), max(used_s, _first_tokens_s(builder)))
    stretch_s = _stretch_s(builder, used_s, empty_s)
    decode_limit_s = min(limit_s, max(used_s, empty_s) + max(kept_s, stretch_s))
    take_decodes(builder, decode_limit_s, BEST_EFFORT_DECODE, by_slack(builder, LATE_DECODE))
    pace_s = math.inf
    for i in range(len(table)):
        if builder.class_of[i] == LATE_DECODE and builder.tokens_out[i] > 0:
            pace_s = min(pace_s, effective_tpot_s(table[i], now_s))
    # Late decodes keep their pace as far as prefills beside them still get half of the iteration.
    limit_s = min(
        limit_s,
        max(pace_s, 2 * composition_s(engine.coef, builder.composition)),
        max(empty_s + stretch_s, used_s + kept_s),
    )
    _limit_s, served = take_prefills(builder, limit_s, BEST_EFFORT_DECODE, LATE_PREFILL, 0.0)
    rows = by_slack(builder, BEST_EFFORT_DECODE)
    if best_effort_s > 0.0 and margin_s <= kept_s:  # what there is, is kept for those that have waited too long
        rows = rows[builder.slack_s[rows] < 0.0]
    take_decodes(builder, decode_limit_s, IDLE, rows)
    if served == OUT_OF_ROOM:  # it has best effort's as soon as that is enough, and waits for these iterations to pass
        others_s = max(empty_s, composition_s(engine.coef, builder.composition))
        limit_s = min(limit_s, max(used_s + kept_s, others_s + LEAST_STRETCH * empty_s))
    if served != OUT_OF_TIME:
        take_prefills(builder, limit_s, IDLE, BEST_EFFORT_PREFILL, 0.0)


@compiled_once(types.void(BUILDER_TYPE))
def ensure_progress(builder: BatchBuilder) -> None:
    """Some request always makes progress: the most entitled one that fits the KV cache, whoever has to yield."""
    engine, table, leader = builder.engine, builder.table, -1
    for i in range(len(table)):
        known_tokens = table[i]["computed_tokens"] + num_uncomputed_tokens(table[i])
        kv_tokens = blocks_tokens(known_tokens, engine.limits["block_tokens"])
        if builder.class_of[i] == IDLE or kv_tokens > engine.limits["kv_capacity_tokens"]:
            continue
        if leader < 0 or (builder.class_of[i], builder.slack_s[i]) < (
            builder.class_of[leader],
            builder.slack_s[leader],
        ):
            leader = i
    if leader < 0:
        return
    row = table[leader]
    tokens = 1 + row["spec_tokens"]
    if not is_decode(row):
        tokens = max(1, chunk_tokens(builder, row, engine.limits["max_iteration_s"], 0))
    if reserve_with_preemption(builder, leader, tokens, DECODE):
        add_tokens(row, tokens, builder.composition)


@policy("slo", plans_drafts=True, plans_ahead=True)
def form_batch(
    engine: EngineModel, table: RequestTable, now_s: float, tokens_out: np.ndarray
) -> tuple[float, np.ndarray]:
    """Fill ``tokens_out`` (i4[rows]) with the tokens each request runs in the iteration that starts at ``now_s``.

    0: not in this batch; ``PREEMPT``: loses its KV cache to a more entitled one. A running request with one token to
    do runs that and its drafts. Returns the predicted seconds and the composition, f8[5]: tokens, KV tokens read by
    decodes, attention pairs, sequences, draft tokens (SLOs-Serve algorithm 2, PolyServe section 4.5). O(n log n).
    """
    rows = len(table)
    count = np.zeros(IDLE + 1, np.int64)
    budget = chunk_budget_tokens(table, engine.limits)
    class_of, slack_s, free, composition = np.empty(rows, np.int64), np.empty(rows), np.zeros(2, np.int64), np.zeros(5)
    builder = BatchBuilder(engine, table, now_s, class_of, count, slack_s, free, composition, tokens_out, budget)
    classify_requests(builder)
    limit_s = _take_due_decodes(builder)
    has_spare = count[BEST_EFFORT_DECODE] + count[BEST_EFFORT_PREFILL] > 0
    kept_share = best_effort_share(builder) if has_spare else 0.0
    best_effort_s = limit_s * kept_share
    limit_s, served = take_prefills(builder, limit_s - best_effort_s, LATE_DECODE, PREFILL, kept_share)
    if served != OUT_OF_TIME and count[PREFILL] > 0:
        take_decodes(builder, limit_s, LATE_DECODE, by_slack(builder, DECODE))
    if has_spare or count[LATE_DECODE] + count[LATE_PREFILL] > 0:
        _add_late_and_best_effort(builder, limit_s, best_effort_s, served == ALL_SERVED)
    if builder.composition[TOKENS] == 0 and count[IDLE] < rows:
        ensure_progress(builder)
    return composition_s(engine.coef, builder.composition), builder.composition
