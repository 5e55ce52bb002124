"""The composition of a batch in the making, and what it costs."""

import numpy as np
from numba import njit

from planning.room import DRAFTS, KV, PAIRS, SEQUENCES, TOKENS, is_decode
from profiles.kernels import attention_pairs, iteration_s


@njit(cache=True)
def mix_s(coef: np.ndarray, mix: np.ndarray) -> float:
    """Seconds of a batch by its composition (tokens, KV tokens read, attention pairs, sequences, draft tokens)."""
    return iteration_s(coef, mix[TOKENS], mix[KV], mix[PAIRS], mix[SEQUENCES], mix[DRAFTS])


@njit(cache=True)
def add(row: np.void, tokens: int, mix: np.ndarray) -> None:
    """Put ``tokens`` of the request into a composition."""
    mix[TOKENS] += tokens
    mix[SEQUENCES] += 1
    if is_decode(row):
        mix[KV] += row["computed_tokens"] + tokens
        mix[DRAFTS] = max(mix[DRAFTS], row["spec_tokens"])
    else:
        mix[PAIRS] += attention_pairs(tokens, row["computed_tokens"])


@njit(cache=True)
def remove_decode(row: np.void, tokens: int, drafts: float, mix: np.ndarray) -> None:
    """Take a decode out of a composition again, whose deepest speculation was ``drafts`` before."""
    mix[TOKENS] -= tokens
    mix[SEQUENCES] -= 1
    mix[KV] -= row["computed_tokens"] + tokens
    mix[DRAFTS] = drafts


@njit(cache=True)
def most_on_time_s(
    coef: np.ndarray, table: np.ndarray, slack_s: np.ndarray, rows: np.ndarray, limit_s: float, all_s: float
) -> float:
    """How long an iteration may last where the decodes ``rows`` (by slack) cannot all run within the least slack.

    Either as many as fit into ``limit_s`` and the others after them, or all at once with the tightest late: whichever
    keeps more of them on time.
    """
    first, rest, served = np.zeros(5), np.zeros(5), 0
    for place in range(len(rows)):
        tokens = 1 + table[rows[place]]["spec_tokens"]
        if served == place:
            drafts = first[DRAFTS]
            add(table[rows[place]], tokens, first)
            if place == 0 or mix_s(coef, first) <= limit_s:
                served += 1
                continue
            remove_decode(table[rows[place]], tokens, drafts, first)
        add(table[rows[place]], tokens, rest)
    both_s = mix_s(coef, first) + mix_s(coef, rest)
    if np.sum(slack_s >= all_s) <= served + np.sum(slack_s[served:] >= both_s):
        return limit_s
    return slack_s[slack_s >= all_s].min()
