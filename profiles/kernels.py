"""The iteration-time model as numba kernels over a coefficient vector; nothing else lives here.

One iteration with ``B`` batch tokens, ``K`` KV tokens read by decodes, prefill chunks ``P_i`` on ``C_i`` cached
tokens, ``S`` sequences and speculation depth ``s`` takes::

    T = max_l(k1_l * B + b_l) + k_kv * K + k_att * sum_i P_i * (C_i + P_i / 2) + k_seq * S + k_spec * s     (l = 1, 2)

The first and last terms are SLOs-Serve section 3.1.1; the others carry attention and the engine's overhead.
"""

import math
from typing import TypeVar

import numpy as np
from numba import njit
from numba.extending import register_jitable

# Positions in the coefficient vector, float64[COEFFICIENTS], all >= 0, seconds (per token, pair, sequence, step).
K1_1, B_1, K1_2, B_2, K_KV, K_ATT, K_SEQ, K_SPEC = range(8)
COEFFICIENTS = 8
Coefficients = np.ndarray  # f8[COEFFICIENTS]
Amount = TypeVar("Amount", float, np.ndarray)  # one number, or one per request


LINES = 2  # of the roofline


# The parts of an iteration, for those who put them together in another way: in kernels, and in Python over arrays.


@register_jitable
def roofline(coef: np.ndarray, line: int) -> tuple[float, float]:
    """Slope (seconds per batch token) and base (seconds per iteration) of one line of the roofline."""
    return coef[2 * line], coef[2 * line + 1]


@register_jitable
def token_s(coef: np.ndarray) -> float:
    """Seconds of one more token in a large batch: the steeper slope."""
    seconds: float = max(coef[K1_1], coef[K1_2])
    return seconds


@register_jitable
def kv_read_s(coef: np.ndarray, kv_tokens: Amount) -> Amount:
    """Seconds in which decodes read so many KV tokens."""
    seconds: Amount = coef[K_KV] * kv_tokens
    return seconds


@register_jitable
def attention_s(coef: np.ndarray, pairs: Amount) -> Amount:
    """Seconds for so many query-key pairs of prefill (``attention_pairs``)."""
    seconds: Amount = coef[K_ATT] * pairs
    return seconds


@register_jitable
def overhead_s(coef: np.ndarray, sequences: Amount) -> Amount:
    """Seconds that the engine spends on so many sequences, beside their tokens."""
    seconds: Amount = coef[K_SEQ] * sequences
    return seconds


@register_jitable
def draft_s(coef: np.ndarray, drafts: Amount) -> Amount:
    """Seconds in which so many tokens are drafted, one after the other."""
    seconds: Amount = coef[K_SPEC] * drafts
    return seconds


@njit(cache=True)
def attention_pairs(chunk_tokens: float, cached_tokens: float) -> float:
    """Query-key pairs of one prefill chunk on its cached context: ``P * (C + P / 2)``."""
    return chunk_tokens * (cached_tokens + 0.5 * chunk_tokens)


@njit(cache=True)
def gemm_s(coef: np.ndarray, batch_tokens: float) -> float:
    """Seconds of the batch-size term alone, the roofline ``max_l(k1_l * B + b_l)``."""
    seconds: float = max(coef[K1_1] * batch_tokens + coef[B_1], coef[K1_2] * batch_tokens + coef[B_2])
    return seconds


@njit(cache=True)
def iteration_s(
    coef: np.ndarray, batch_tokens: float, kv_tokens: float, pairs: float, sequences: float, spec_steps: float
) -> float:
    """Seconds of one iteration; an empty batch (no tokens) takes none."""
    if batch_tokens <= 0:
        return 0.0
    rest = coef[K_KV] * kv_tokens + coef[K_ATT] * pairs + coef[K_SEQ] * sequences + coef[K_SPEC] * spec_steps
    seconds: float = gemm_s(coef, batch_tokens) + rest
    return seconds


@njit(cache=True)
def max_prefill_tokens(coef: np.ndarray, budget_s: float, composition: np.ndarray, cached_tokens: float) -> int:
    """Largest chunk on ``cached_tokens`` that fits beside the given batch within ``budget_s`` (time2bs).

    ``composition`` (f8[5]) are the last five arguments of ``iteration_s``.

    The chunk adds one sequence. Solves the two quadratics (one per roofline line) in closed form and takes the
    smaller root; 0 when not even one token fits.
    """
    batch_tokens, kv_tokens, pairs = composition[0], composition[1], composition[2]
    sequences, spec_steps = composition[3], composition[4]
    rest = coef[K_KV] * kv_tokens + coef[K_ATT] * pairs + coef[K_SEQ] * (sequences + 1) + coef[K_SPEC] * spec_steps
    chunk = math.inf
    for line in range(2):
        slope, base = coef[2 * line], coef[2 * line + 1]
        room_s = budget_s - rest - base - slope * batch_tokens
        if room_s <= 0:
            return 0
        linear, square = slope + coef[K_ATT] * cached_tokens, 0.5 * coef[K_ATT]
        if square > 0:
            root = (math.sqrt(linear * linear + 4.0 * square * room_s) - linear) / (2.0 * square)
        elif linear > 0:
            root = room_s / linear
        else:
            continue
        chunk = min(chunk, root)
    return int(min(chunk + 1e-9, 2.0**31 - 1))
