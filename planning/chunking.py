"""Prefill in chunks: whole-prompt-friendly batches for prefill replicas, and chunks that last for co-located ones.

PolyServe section 4.7. On a prefill replica the last chunk of a prompt is merged into the one before it, so that a
prompt just over the budget does not wait for one more iteration. Beside decodes, a prompt is only counted on if the
chunk predicted now can be kept up while the KV cache grows.
"""

import math

import numpy as np
from numba import njit

from planning.deadlines import effective_tpot_s, next_due_s, todo_tokens
from planning.mix import add, mix_s
from planning.prefill_only import chunk_within
from planning.rollout import leave, run_tokens
from planning.room import (
    FREE_KV,
    FREE_SEQUENCES,
    KV,
    PAIRS,
    SEQUENCES,
    TOKENS,
    held_kv_tokens,
    is_decode,
    reserve,
)
from profiles.kernels import attention_pairs, iteration_s, max_prefill_tokens

MAX_ROUNDS = 64  # of shrinking a chunk until it lasts


@njit(cache=True)
def form_prefill_batch(
    coef: np.ndarray, table: np.ndarray, now_s: float, limits: np.void, tokens_out: np.ndarray
) -> tuple[float, np.ndarray]:
    """An iteration of a prefill replica: prompts by deadline in dynamic chunks; see ``form_batch`` for the arguments.

    The budget is half of ``max_batch_tokens``, so that a merged last chunk stays within the engine's own limit.
    """
    budget, mix, free = limits["max_batch_tokens"] // 2, np.zeros(5), np.zeros(2, np.int64)
    free[FREE_KV] = limits["kv_capacity_tokens"] // limits["block_tokens"] * limits["block_tokens"]
    free[FREE_SEQUENCES] = limits["max_running"]
    due_s = np.empty(len(table))
    for i in range(len(table)):
        due_s[i] = next_due_s(table[i], now_s)
        tokens_out[i] = 0
        if table[i]["running"]:
            free[FREE_KV] -= held_kv_tokens(table[i], limits["block_tokens"])
            free[FREE_SEQUENCES] -= 1
    for i in np.argsort(due_s, kind="mergesort"):
        row = table[i]
        chunk = chunk_within(max(0, todo_tokens(row)), int(mix[TOKENS]), budget)
        if chunk > 0 and reserve(row, chunk, limits["block_tokens"], free):
            tokens_out[i] = chunk
            add(row, chunk, mix)
    return mix_s(coef, mix), mix


@njit(cache=True)
def prefill_outlook(coef: np.ndarray, table: np.ndarray, start_s: float, limits: np.void, first_s: np.ndarray) -> float:
    """When each prompt of a prefill replica will be done (``first_s``, f8[rows]); returns the worst time to spare.

    Every request leaves with its first token: it decodes elsewhere. ``inf`` where a prompt can never run.
    """
    copy, tokens, now_s, worst_s = table.copy(), np.zeros(len(table), dtype=np.int32), start_s, math.inf
    first_s[:] = math.inf
    while True:
        seconds, _mix = form_prefill_batch(coef, copy, now_s, limits, tokens)
        if seconds <= 0.0:
            break
        now_s += seconds
        for i in range(len(copy)):
            if tokens[i] > 0 and run_tokens(copy[i], tokens[i], 0.0, True):
                first_s[i] = now_s
                leave(copy[i])
    for i in range(len(table)):
        if todo_tokens(table[i]) > 0 and not table[i]["best_effort"]:
            worst_s = min(worst_s, next_due_s(table[i], start_s) - first_s[i])
    return worst_s


@njit(cache=True)
def lasting_chunk(
    coef: np.ndarray, table: np.ndarray, row: np.void, start_s: float, limits: np.void
) -> tuple[int, float]:
    """Chunk of ``row``'s prompt that every iteration of its prefill has room for beside the decodes of ``table``, and
    when the prompt would then be done; 0 and ``inf`` when there is none.

    The iterations last as long as the tightest pace allows. The chunk is the one of the last iteration, when the KV
    tokens of the decodes have grown by one per iteration and the prompt attends to all of itself.
    """
    mix, step_s, left = np.zeros(5), limits["max_iteration_s"], todo_tokens(row)
    for i in range(len(table)):
        if is_decode(table[i]) and not table[i]["best_effort"]:
            add(table[i], 1 + table[i]["spec_tokens"], mix)
            step_s = min(step_s, effective_tpot_s(table[i], start_s))
    chunk = left
    for _ in range(MAX_ROUNDS):
        iterations = math.ceil(left / chunk)
        kv_tokens = mix[KV] + mix[SEQUENCES] * (iterations - 1)
        cached = row["computed_tokens"] + left - min(left, chunk)
        room = max_prefill_tokens(coef, step_s, mix[TOKENS], kv_tokens, 0.0, mix[SEQUENCES], 0.0, cached)
        room = min(room, int(limits["max_batch_tokens"] - mix[TOKENS]))
        if room <= 0:
            return 0, math.inf
        if room >= chunk:
            return chunk, start_s + _chunks_s(coef, row, left, chunk, mix)
        chunk = room
    return 0, math.inf


@njit(cache=True)
def _chunks_s(coef: np.ndarray, row: np.void, left: int, chunk: int, decodes: np.ndarray) -> float:
    """Seconds of all iterations of a prompt in chunks beside growing decodes."""
    seconds, cached, mix = 0.0, row["computed_tokens"], decodes.copy()
    while left > 0:
        tokens = min(left, chunk)
        pairs = attention_pairs(tokens, cached)
        seconds += iteration_s(coef, mix[TOKENS] + tokens, mix[KV], mix[PAIRS] + pairs, mix[SEQUENCES] + 1, 0.0)
        left, cached = left - tokens, cached + tokens
        mix[KV] += mix[SEQUENCES]
    return seconds
