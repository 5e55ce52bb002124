"""Adding requests to a batch that is being formed: decodes in an order, prefill chunks of a class by deadline. Pure."""

import math

import numpy as np
from numba import float64, int64, njit, types

from planning.batch.builder import (
    BUILDER_TYPE,
    BatchBuilder,
    by_slack,
    free_after_preemption,
    held_by_best_effort,
    reserve_with_preemption,
    tokens_kept_free,
)
from planning.batch.classes import BEST_EFFORT_PREFILL, IDLE, PREFILL
from planning.batch.composition import DRAFT_TOKENS, TOKENS, add_tokens, composition_s, remove_decode
from planning.batch.kv import FREE_KV, needed, reserve
from planning.batch.prefill_only import chunk_within
from planning.deadlines import num_uncomputed_tokens
from profiles.compiled_once import compiled_once
from profiles.kernels import max_prefill_tokens

# How far the prefills of a class were served.
ALL_SERVED, OUT_OF_ROOM, OUT_OF_TIME = range(3)


@njit(cache=True)
def chunk_tokens(builder: BatchBuilder, row: np.void, limit_s: float, kept_tokens: int) -> int:
    """Largest prefill chunk of the request that keeps the batch within ``limit_s`` and the engine's token limit.

    ``kept_tokens`` are left to others, unless the prompt ends with the chunk.
    """
    engine, composition, todo = builder.engine, builder.composition, num_uncomputed_tokens(row)
    room = max_prefill_tokens(engine.coef, limit_s, composition, row["computed_tokens"])
    chunk = chunk_within(todo, int(composition[TOKENS]), builder.chunk_budget)
    chunk = min(todo, chunk, room, int(engine.limits["max_batch_tokens"] - composition[TOKENS]))
    most = int(engine.limits["max_batch_tokens"] - composition[TOKENS]) - kept_tokens
    return chunk if chunk == todo else max(0, min(chunk, most))


@compiled_once(types.void(BUILDER_TYPE, float64, int64, int64[::1]))
def take_decodes(builder: BatchBuilder, limit_s: float, rank: int, rows: np.ndarray) -> None:
    """Add those of the decodes ``rows`` that are not in the batch, in order, until one no longer fits ``limit_s``.

    The first decode of a batch is taken whatever it costs: nothing shorter would serve it.
    """
    engine, table, composition, tokens_out = builder.engine, builder.table, builder.composition, builder.tokens_out
    coef, limits, free = engine.coef, engine.limits, builder.free
    for i in rows:
        row = table[i]
        if tokens_out[i] != 0:
            continue
        tokens = 1 + row["spec_tokens"]
        drafts, is_first = composition[DRAFT_TOKENS], composition[TOKENS] == 0
        add_tokens(row, tokens, composition)
        is_over = composition[TOKENS] > limits["max_batch_tokens"] or composition_s(coef, composition) > limit_s
        if is_over and not is_first:
            remove_decode(row, tokens, drafts, composition)
            return
        if reserve(row, tokens, limits["block_tokens"], free):
            tokens_out[i] = tokens
        elif rank == IDLE or not reserve_with_preemption(builder, i, tokens, rank):
            remove_decode(row, tokens, drafts, composition)


@compiled_once(types.Tuple((float64, int64))(BUILDER_TYPE, float64, int64, int64, float64))
def take_prefills(
    builder: BatchBuilder, limit_s: float, rank: int, request_class: int, kept_share: float
) -> tuple[float, int]:
    """Add prefill chunks of one class by deadline; returns the iteration's limit after it and how far they were served.
    ``kept_share`` of the tokens that the batch may still have is left to others.

    A first token must not wait for what is placed behind it beyond its own deadline less the slack margin: the limit
    falls to that, less what is kept. Best effort begins and resumes only where it leaves ``tokens_kept_free``, and not
    behind one that is older than ``aging_s`` and lacks only what other best effort holds: else that would never find so
    much at once.
    """
    engine, table, composition, tokens_out = builder.engine, builder.table, builder.composition, builder.tokens_out
    served, block_tokens, free = ALL_SERVED, engine.limits["block_tokens"], builder.free
    kept_tokens = int(kept_share * (engine.limits["max_batch_tokens"] - composition[TOKENS]))
    most = free[:0]  # what preemption could yield; empty: not known
    is_spare = request_class == BEST_EFFORT_PREFILL and builder.counts[request_class] > 0
    kept_kv_tokens = tokens_kept_free(builder) if is_spare else -math.inf
    gathered_tokens, gathers = held_by_best_effort(builder) if is_spare else 0, False
    for i in by_slack(builder, request_class):
        row = table[i]
        if tokens_out[i] != 0:
            continue
        chunk = chunk_tokens(builder, row, limit_s, kept_tokens)
        if chunk <= 0:
            return limit_s, OUT_OF_TIME
        if is_spare and not row["running"]:
            left = free[FREE_KV] - needed(row, chunk, block_tokens)[0]
            if gathers or left < max(kept_kv_tokens, 0.0):
                gathers = gathers or (builder.slack_s[i] < 0.0 and left + gathered_tokens >= kept_kv_tokens)
                served = OUT_OF_ROOM
                continue
        has_room = reserve(row, chunk, block_tokens, free)
        if not has_room and len(most) == 0:
            most = free_after_preemption(builder, rank)
        if len(most) > 0 and not reserve(row, chunk, block_tokens, most):
            served = OUT_OF_ROOM
            continue
        if not has_room:
            reserve_with_preemption(builder, i, chunk, rank)
        tokens_out[i] = chunk
        add_tokens(row, chunk, composition)
        if chunk < num_uncomputed_tokens(row):
            return limit_s, OUT_OF_TIME
        if request_class == PREFILL:
            least_s = (1.0 - kept_share) * builder.slack_s[i] / (1.0 + engine.limits["slack_margin"])
            limit_s = min(limit_s, max(least_s, composition_s(engine.coef, composition)))
    return limit_s, served
