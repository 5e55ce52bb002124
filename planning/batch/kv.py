"""The KV cache as batch formation counts it: whole blocks, free tokens and sequences."""

import numpy as np
from numba import njit

from planning.deadlines import num_uncomputed_tokens

# What an engine has left: KV tokens in whole blocks, sequences.
FREE_KV, FREE_SEQUENCES = range(2)
PREEMPT = -1  # in tokens_out: give up the KV cache, keep the tokens, wait for a recompute


@njit(cache=True)
def blocks_tokens(tokens: int, block_tokens: int) -> int:
    """KV tokens in whole blocks."""
    return -(-tokens // block_tokens) * block_tokens


@njit(cache=True)
def empty_engine(limits: np.void, free: np.ndarray) -> None:
    """What is free on an engine without requests (i8[2])."""
    block_tokens = limits["block_tokens"]
    free[FREE_KV] = limits["kv_capacity_tokens"] // block_tokens * block_tokens
    free[FREE_SEQUENCES] = limits["max_running"]


@njit(cache=True)
def held_kv_tokens(row: np.void, block_tokens: int) -> int:
    """KV tokens that a request occupies; a prefill under way has reserved its whole prompt."""
    if not row["running"]:
        return 0
    todo = num_uncomputed_tokens(row)
    return blocks_tokens(row["computed_tokens"] + (todo if todo > 1 else 0), block_tokens)


@njit(cache=True)
def wanted_kv_tokens(row: np.void, block_tokens: int) -> int:
    """KV tokens that a request occupies, or will as soon as it runs: what a prefix cache holds of it included."""
    if row["running"]:
        return int(held_kv_tokens(row, block_tokens))
    return int(row["computed_tokens"] + num_uncomputed_tokens(row))


@njit(cache=True)
def needed(row: np.void, tokens: int, block_tokens: int) -> tuple[int, int]:
    """KV tokens and sequences that the request needs beyond what it has, to run ``tokens``.

    A prefill reserves its whole prompt, so that prompts under way never wait for one another's blocks. What others hold
    of it already takes no more room.
    """
    total = row["computed_tokens"] + max(tokens, num_uncomputed_tokens(row))
    held = held_kv_tokens(row, block_tokens) if row["running"] else row["shared_tokens"]
    return blocks_tokens(total, block_tokens) - held, 0 if row["running"] else 1


@njit(cache=True)
def reserve(row: np.void, tokens: int, block_tokens: int, free: np.ndarray) -> bool:
    """Take the KV and the sequence that the request needs out of ``free`` if they are there."""
    kv_tokens, sequences = needed(row, tokens, block_tokens)
    if free[FREE_KV] < kv_tokens or free[FREE_SEQUENCES] < sequences:
        return False
    free[FREE_KV] -= kv_tokens
    free[FREE_SEQUENCES] -= sequences
    return True
