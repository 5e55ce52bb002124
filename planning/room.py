"""What a request is to one iteration, and what the engine has left for it: kinds, KV blocks, sequences."""

import math
from typing import NamedTuple

import numpy as np
from numba import njit

from planning.deadlines import next_due_s, todo_tokens
from profiles.kernels import K_ATT, K_SEQ, attention_pairs, iteration_s

# What a request is to an iteration, most entitled first.
DECODE, PREFILL, LATE_DECODE, LATE_PREFILL, SPARE_DECODE, SPARE_PREFILL, IDLE = range(7)
# What is left of the engine: KV tokens in whole blocks, sequences.
FREE_KV, FREE_SEQUENCES = range(2)
# Composition of a batch: the arguments of iteration_s.
TOKENS, KV, PAIRS, SEQUENCES, DRAFTS = range(5)
PREEMPT = -1  # in tokens_out: give up the KV cache, keep the tokens, wait for a recompute


class Draft(NamedTuple):
    """A batch in the making: arrays that the steps of batch formation fill in."""

    kind: np.ndarray  # i8[rows]
    counts: np.ndarray  # i8[IDLE + 1], rows of each kind
    slack_s: np.ndarray  # f8[rows]
    free: np.ndarray  # i8[2]
    mix: np.ndarray  # f8[5]
    tokens_out: np.ndarray  # i4[rows]
    chunk_budget: int  # tokens, see ``planning.prefill_only``


@njit(cache=True)
def blocks_tokens(tokens: int, block_tokens: int) -> int:
    """KV tokens in whole blocks."""
    return -(-tokens // block_tokens) * block_tokens


@njit(cache=True)
def held_kv_tokens(row: np.void, block_tokens: int) -> int:
    """KV tokens that a request occupies; a prefill under way has reserved its whole prompt."""
    if not row["running"]:
        return 0
    todo = todo_tokens(row)
    return blocks_tokens(row["computed_tokens"] + (todo if todo > 1 else 0), block_tokens)


@njit(cache=True)
def decode_s(coef: np.ndarray, row: np.void) -> float:
    """Seconds of an iteration with this decode alone: the least in which its next token can come."""
    own = 1.0 + row["spec_tokens"]
    return iteration_s(coef, own, row["computed_tokens"] + own, 0.0, 1.0, row["spec_tokens"])


@njit(cache=True)
def prefill_s(coef: np.ndarray, row: np.void, limits: np.void) -> float:
    """Least seconds until the first token, with the engine to itself and chunks as large as it allows."""
    todo, seconds = todo_tokens(row), 0.0
    pairs = attention_pairs(todo, row["computed_tokens"])
    chunks = math.ceil(todo / limits["max_batch_tokens"])
    chunks = max(chunks, math.ceil(iteration_s(coef, todo, 0.0, pairs, 1.0, 0.0) / limits["max_iteration_s"] - 1e-9))
    for line in range(2):
        seconds = max(seconds, coef[2 * line] * todo + coef[2 * line + 1] * chunks)
    return seconds + coef[K_ATT] * pairs + coef[K_SEQ] * chunks


@njit(cache=True)
def is_decode(row: np.void) -> bool:
    """Whether the request's next iteration is a decode step (or the last token of a prompt: the same work)."""
    return row["running"] and todo_tokens(row) == 1


@njit(cache=True)
def kind_of(coef: np.ndarray, row: np.void, limits: np.void, slack_s: float) -> int:
    """How the request takes part; late means that not even the whole engine could meet its next deadline."""
    if todo_tokens(row) <= 0:
        return IDLE
    decodes = is_decode(row)
    if row["best_effort"]:
        return SPARE_DECODE if decodes else SPARE_PREFILL
    if slack_s == math.inf:
        return DECODE if decodes else PREFILL
    if decodes:
        return DECODE if slack_s >= decode_s(coef, row) else LATE_DECODE
    return PREFILL if slack_s >= prefill_s(coef, row, limits) else LATE_PREFILL


@njit(cache=True)
def survey(coef: np.ndarray, table: np.ndarray, now_s: float, limits: np.void, draft: Draft) -> None:
    """Sort the requests into kinds, measure their slack and what the engine has left; empties the batch."""
    block_tokens = limits["block_tokens"]
    draft.free[FREE_KV] = limits["kv_capacity_tokens"] // block_tokens * block_tokens
    draft.free[FREE_SEQUENCES] = limits["max_running"]
    for i in range(len(table)):
        row = table[i]
        draft.slack_s[i] = next_due_s(row, now_s) - now_s
        draft.kind[i] = kind_of(coef, row, limits, draft.slack_s[i])
        draft.counts[draft.kind[i]] += 1
        draft.tokens_out[i] = 0
        if row["running"]:
            draft.free[FREE_KV] -= held_kv_tokens(row, block_tokens)
            draft.free[FREE_SEQUENCES] -= 1


@njit(cache=True)
def _may_yield(table: np.ndarray, i: int, rank: int, draft: Draft) -> bool:
    """Whether request ``i`` holds KV, is not in the batch and is of kind ``rank`` or less entitled."""
    return table[i]["running"] and draft.tokens_out[i] == 0 and rank <= draft.kind[i] < IDLE


@njit(cache=True)
def _preempt_one(table: np.ndarray, rank: int, block_tokens: int, draft: Draft) -> None:
    """Take the KV cache of the least entitled, latest arrived request that may yield."""
    victim = -1
    for i in range(len(table)):
        if _may_yield(table, i, rank, draft):
            row, worst = table[i], table[victim]
            if victim < 0 or (draft.kind[i], row["arrival_s"], row["id"]) > (
                draft.kind[victim],
                worst["arrival_s"],
                worst["id"],
            ):
                victim = i
    draft.free[FREE_KV] += held_kv_tokens(table[victim], block_tokens)
    draft.free[FREE_SEQUENCES] += 1
    draft.tokens_out[victim] = PREEMPT


@njit(cache=True)
def reserve(row: np.void, tokens: int, block_tokens: int, free: np.ndarray) -> bool:
    """Take the KV and the sequence for ``tokens`` of the request out of ``free`` if they are there.

    A prefill reserves its whole prompt, so that prompts under way never wait for one another's blocks.
    """
    total = row["computed_tokens"] + max(tokens, todo_tokens(row))
    kv_tokens = blocks_tokens(total, block_tokens) - held_kv_tokens(row, block_tokens)
    sequences = 0 if row["running"] else 1
    if free[FREE_KV] < kv_tokens or free[FREE_SEQUENCES] < sequences:
        return False
    free[FREE_KV] -= kv_tokens
    free[FREE_SEQUENCES] -= sequences
    return True


@njit(cache=True)
def obtainable(table: np.ndarray, rank: int, block_tokens: int, draft: Draft) -> np.ndarray:
    """What the engine would have left if every request that may yield to ``rank`` did."""
    most = draft.free.copy()
    for i in range(len(table)):
        if _may_yield(table, i, rank, draft):
            most[FREE_KV] += held_kv_tokens(table[i], block_tokens)
            most[FREE_SEQUENCES] += 1
    return most


@njit(cache=True)
def make_room(table: np.ndarray, i: int, tokens: int, rank: int, block_tokens: int, draft: Draft) -> bool:
    """Reserve room for ``tokens`` of request ``i``; preempts kinds ``rank`` and beyond, but never in vain."""
    draft.tokens_out[i] = tokens  # not its own victim
    if not reserve(table[i], tokens, block_tokens, obtainable(table, rank, block_tokens, draft)):
        draft.tokens_out[i] = 0
        return False
    while not reserve(table[i], tokens, block_tokens, draft.free):
        _preempt_one(table, rank, block_tokens, draft)
    return True
