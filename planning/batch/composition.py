"""The composition of a batch in the making, and what it costs."""

import math

import numpy as np
from numba import float64, int64, njit

from planning.batch.classes import is_decode
from planning.tables import TABLE_TYPE, RequestTable
from profiles.compiled_once import compiled_once
from profiles.kernels import Coefficients, attention_pairs, iteration_s

# Composition of a batch: the arguments of iteration_s.
TOKENS, KV, PAIRS, SEQUENCES, DRAFT_TOKENS = range(5)


@njit(cache=True)
def composition_s(coef: Coefficients, composition: np.ndarray) -> float:
    """Seconds of a batch by its composition (tokens, KV tokens read, attention pairs, sequences, draft tokens)."""
    return iteration_s(
        coef,
        composition[TOKENS],
        composition[KV],
        composition[PAIRS],
        composition[SEQUENCES],
        composition[DRAFT_TOKENS],
    )


@njit(cache=True)
def add_tokens(row: np.void, tokens: int, composition: np.ndarray) -> None:
    """Put ``tokens`` of the request into a composition."""
    composition[TOKENS] += tokens
    composition[SEQUENCES] += 1
    if is_decode(row):
        composition[KV] += row["computed_tokens"] + tokens
        composition[DRAFT_TOKENS] = max(composition[DRAFT_TOKENS], row["spec_tokens"])
    else:
        composition[PAIRS] += attention_pairs(tokens, row["computed_tokens"])


@njit(cache=True)
def remove_decode(row: np.void, tokens: int, drafts: float, composition: np.ndarray) -> None:
    """Take a decode out of a composition again, whose deepest speculation was ``drafts`` before."""
    composition[TOKENS] -= tokens
    composition[SEQUENCES] -= 1
    composition[KV] -= row["computed_tokens"] + tokens
    composition[DRAFT_TOKENS] = drafts


@compiled_once(float64(float64[::1], TABLE_TYPE, float64[::1], int64[::1], float64, float64))
def most_on_time_s(
    coef: Coefficients, table: RequestTable, slack_s: np.ndarray, rows: np.ndarray, limit_s: float, all_s: float
) -> float:
    """How long an iteration may last where the decodes ``rows`` (by slack) cannot all run within the least slack.

    Either as many as fit into ``limit_s`` and the others after them, or all at once with the tightest late: whichever
    keeps more of them on time.
    """
    first, rest, served = np.zeros(5), np.zeros(5), 0
    for pos in range(len(rows)):
        tokens = 1 + table[rows[pos]]["spec_tokens"]
        if served == pos:
            drafts = first[DRAFT_TOKENS]
            add_tokens(table[rows[pos]], tokens, first)
            if pos == 0 or composition_s(coef, first) <= limit_s:
                served += 1
                continue
            remove_decode(table[rows[pos]], tokens, drafts, first)
        add_tokens(table[rows[pos]], tokens, rest)
    both_s = composition_s(coef, first) + composition_s(coef, rest)
    together, one_by_one, least_s = 0, served, math.inf
    for pos in range(len(slack_s)):
        if slack_s[pos] >= all_s:
            together, least_s = together + 1, min(least_s, slack_s[pos])
        if pos >= served and slack_s[pos] >= both_s:
            one_by_one += 1
    return limit_s if together <= one_by_one else least_s
