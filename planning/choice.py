"""Choosing a set of requests: the programme proposes, a replay of the replica's own batches disposes."""

import math

import numpy as np
from numba import njit

from planning.deadlines import next_due_s, remaining_tokens
from planning.demand import prefill_cost_tokens
from planning.dynamic import MAX_CHOICES
from planning.proposal import CHOSEN, OPEN, PROMISED, REFUSED, propose
from planning.rollout import OUTLOOK, TOLERANCE_S, rollout
from planning.room import LATE_DECODE, LATE_PREFILL, kind_of

# Reasons in kernels: positions in planning.admission.REASONS.
ADMITTED, TTFT, TPOT, DEADLINE, BREAKS, KV_FULL, DISPLACED = range(7)
EXHAUSTIVE = 3  # so few open requests are chosen by trying every set


@njit(cache=True)
def why_unattainable(row: np.void, seen: np.void, worst_s: float, peak_tokens: float, limits: np.void) -> int:
    """Reason code for one request after a rollout with it; ``ADMITTED`` when everything promised holds with it."""
    if seen["margin_s"] < -TOLERANCE_S:
        if seen["first_s"] == math.inf or seen["first_s"] > row["arrival_s"] + row["ttft_s"] + TOLERANCE_S:
            return TTFT
        return DEADLINE if seen["finish_s"] > row["deadline_s"] + TOLERANCE_S else TPOT
    if worst_s < -TOLERANCE_S:
        return BREAKS
    if peak_tokens > limits["kv_capacity_tokens"] * (1.0 - limits["kv_headroom"]):
        return KV_FULL
    return ADMITTED


@njit(cache=True)
def rehearse(
    coef: np.ndarray, limits: np.void, table: np.ndarray, is_in: np.ndarray, start_s: float, outlook: np.ndarray
) -> tuple[float, float]:
    """Roll out the rows marked ``is_in``; fills their outlook in and returns the worst margin and the KV peak."""
    rows = np.flatnonzero(is_in)
    seen = outlook[rows]
    worst_s, peak_tokens = rollout(coef, table[rows], start_s, limits, -TOLERANCE_S, seen)
    for place in range(len(rows)):
        outlook[rows[place]] = seen[place]
    return worst_s, peak_tokens


@njit(cache=True)
def mark_late(coef: np.ndarray, limits: np.void, table: np.ndarray, start_s: float, outlook: np.ndarray) -> None:
    """Mark those of the promised requests ``table`` as doomed whose next deadline is out of reach already."""
    for i in range(len(table)):
        slack_s = next_due_s(table[i], start_s) - start_s
        outlook[i]["doomed"] = kind_of(coef, table[i], limits, slack_s) in (LATE_DECODE, LATE_PREFILL)


@njit(cache=True)
def mark_doomed(
    coef: np.ndarray, limits: np.void, table: np.ndarray, role: np.ndarray, start_s: float, outlook: np.ndarray
) -> bool:
    """Mark promised requests that will miss even if nothing more is promised; True when there are any."""
    rows = np.flatnonzero(role == PROMISED)
    seen = np.zeros(len(rows), dtype=OUTLOOK)
    rollout(coef, table[rows], start_s, limits, -math.inf, seen)
    found = False
    for place in range(len(rows)):
        outlook[rows[place]]["doomed"] = seen[place]["margin_s"] < -TOLERANCE_S
        found |= outlook[rows[place]]["doomed"]
    return found


@njit(cache=True)
def _is_attainable(
    coef: np.ndarray, limits: np.void, table: np.ndarray, is_in: np.ndarray, start_s: float, outlook: np.ndarray
) -> bool:
    """Whether everything marked ``is_in`` keeps its SLO and fits the KV cache."""
    worst_s, peak_tokens = rehearse(coef, limits, table, is_in, start_s, outlook)
    return worst_s >= -TOLERANCE_S and peak_tokens <= limits["kv_capacity_tokens"] * (1.0 - limits["kv_headroom"])


@njit(cache=True)
def _by_preference(coef: np.ndarray, table: np.ndarray, options: np.ndarray) -> np.ndarray:
    """Open requests, most value per work first (unit values: shortest first), ties by id."""
    weight = np.empty(len(options))
    for j in range(len(options)):
        row = table[options[j]]
        work = prefill_cost_tokens(coef, row) + remaining_tokens(row)
        weight[j] = -row["value"] / max(1.0, work)
    by_id = options[np.argsort(table["id"][options], kind="mergesort")]
    return by_id[np.argsort(weight[np.searchsorted(options, by_id)], kind="mergesort")]


@njit(cache=True)
def _try_every_set(
    coef: np.ndarray,
    limits: np.void,
    table: np.ndarray,
    role: np.ndarray,
    ranked: np.ndarray,
    start_s: float,
    outlook: np.ndarray,
) -> None:
    """Choose the most valuable attainable set of few open requests; of equal ones the one of preferred requests."""
    count = len(ranked)
    worth = np.zeros(1 << count)
    for bits in range(1 << count):
        for j in range(count):
            if (bits >> j) & 1:
                worth[bits] += table[ranked[j]]["value"] + 1e-9
    for bits in np.argsort(-worth, kind="mergesort"):
        is_in = role == PROMISED
        for j in range(count):
            is_in[ranked[j]] = (bits >> j) & 1
        if bits == 0 or _is_attainable(coef, limits, table, is_in, start_s, outlook):
            for j in range(count):
                role[ranked[j]] = CHOSEN if (bits >> j) & 1 else OPEN
            return


@njit(cache=True)
def _follow_proposal(
    coef: np.ndarray,
    limits: np.void,
    table: np.ndarray,
    role: np.ndarray,
    ranked: np.ndarray,
    start_s: float,
    outlook: np.ndarray,
) -> None:
    """Choose what the programme proposes, less the least preferred requests until the rest is attainable."""
    role[ranked[MAX_CHOICES:]] = REFUSED
    options = np.sort(ranked[:MAX_CHOICES])
    picked = propose(coef, limits, table, role, options, start_s)
    is_in = role == PROMISED
    is_in[options[picked]] = True
    dearest = len(ranked)
    while picked.any() and not _is_attainable(coef, limits, table, is_in, start_s, outlook):
        dearest -= 1
        while not is_in[ranked[dearest]]:
            dearest -= 1
        is_in[ranked[dearest]], picked[np.searchsorted(options, ranked[dearest])] = False, False
    role[options[picked]] = CHOSEN
    role[ranked[MAX_CHOICES:]] = OPEN


@njit(cache=True)
def _fill_up(
    coef: np.ndarray,
    limits: np.void,
    table: np.ndarray,
    role: np.ndarray,
    ranked: np.ndarray,
    start_s: float,
    outlook: np.ndarray,
    reasons: np.ndarray,
) -> None:
    """Try what is still open beside what was chosen, most preferred first; gives every request its reason."""
    for i in ranked:
        if role[i] != OPEN:
            continue
        role[i] = CHOSEN
        seen = outlook.copy()
        is_in = (role == PROMISED) | (role == CHOSEN)
        worst_s, peak_tokens = rehearse(coef, limits, table, is_in, start_s, seen)
        reasons[i] = why_unattainable(table[i], seen[i], worst_s, peak_tokens, limits)
        if reasons[i] == ADMITTED:
            outlook[:] = seen
        else:
            role[i] = REFUSED


@njit(cache=True)
def choose(
    coef: np.ndarray, limits: np.void, table: np.ndarray, role: np.ndarray, start_s: float, outlook: np.ndarray
) -> np.ndarray:
    """Settle every ``OPEN`` row of ``table`` as ``CHOSEN`` or ``REFUSED`` beside the ``PROMISED`` ones (in ``role``).

    The chosen set is attainable by a replay of batch formation to every predicted end. In the steady state one replay
    of everything settles it; up to ``EXHAUSTIVE`` requests by trying every set; beyond, the dynamic programme proposes,
    the replay repairs, and what still fits is added. Fills ``outlook`` (OUTLOOK[rows]); returns reason codes.
    """
    reasons, everyone = np.zeros(len(table), dtype=np.int64), np.ones(len(table), np.bool_)
    options = np.flatnonzero(role == OPEN)
    mark_late(coef, limits, table, start_s, outlook)
    is_late = outlook["doomed"].copy()
    for i in options:
        outlook[i]["doomed"] = False
    if len(options) == 0 or _is_attainable(coef, limits, table, everyone, start_s, outlook):
        role[options] = CHOSEN
        return reasons
    has_doomed = mark_doomed(coef, limits, table, role, start_s, outlook)
    if has_doomed and _is_attainable(coef, limits, table, everyone, start_s, outlook):
        role[options] = CHOSEN
        return reasons
    ranked = _by_preference(coef, table, options)
    late, timely = ranked[is_late[ranked]], ranked[~is_late[ranked]]
    role[late] = REFUSED  # nothing could be promised to them
    if 1 < len(timely) <= EXHAUSTIVE:
        _try_every_set(coef, limits, table, role, timely, start_s, outlook)
    elif len(timely) > EXHAUSTIVE:
        _follow_proposal(coef, limits, table, role, timely, start_s, outlook)
    role[late] = OPEN  # each is told why
    _fill_up(coef, limits, table, role, ranked, start_s, outlook, reasons)
    if not (role == CHOSEN).any():
        rehearse(coef, limits, table, role == PROMISED, start_s, outlook)
    return reasons
