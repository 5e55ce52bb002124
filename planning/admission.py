"""Soft admission control: which new requests to promise their SLO, given everything already promised.

SLOs-Serve section 3.2.1. A set is attainable when a replay of the replica's own batches, from the end of the iteration
in flight to every predicted end, leaves no token late and no KV cache full.
"""

import math
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numba import njit

from planning.deadlines import next_due_s
from planning.rollout import OUTLOOK, rollout

TOLERANCE_S = 1e-9
# Reasons in kernels: positions in REASONS.
ADMITTED, TTFT, TPOT, DEADLINE, BREAKS, KV_FULL, DISPLACED = range(7)


class AdmitReason(StrEnum):
    """Why a request was admitted or not."""

    ADMITTED = "admitted"
    TTFT_UNATTAINABLE = "ttft_unattainable"
    TPOT_UNATTAINABLE = "tpot_unattainable"
    DEADLINE_UNATTAINABLE = "deadline_unattainable"
    WOULD_BREAK_ADMITTED = "would_break_admitted"
    KV_FULL = "kv_full"
    DISPLACED = "displaced"  # a set worth more was chosen over it


REASONS = tuple(AdmitReason)


@dataclass(frozen=True)
class AdmissionOptions:
    """How a set is chosen."""

    displace: bool = False  # waiting requests without any progress may lose their promise to a better set
    retry_after: bool = False  # look for the time at which a refused request would be attainable
    horizon_s: float = 30.0  # how far ahead that is looked for


@dataclass(frozen=True)
class AdmissionPlan:
    """Which of the new requests are admitted and what to expect; arrays have one entry per new request."""

    accepted: np.ndarray  # bool
    predicted_ttft_s: np.ndarray  # from arrival; inf when refused and not foreseen
    predicted_tpot_s: np.ndarray
    reasons: tuple[AdmitReason, ...]
    earliest_s: np.ndarray  # absolute time at which it would be attainable; inf: not within the horizon, or not asked
    displaced: np.ndarray  # bool, one entry per running request: lost its promise


@njit(cache=True)
def why_unattainable(
    table: np.ndarray, i: int, outlook: np.ndarray, worst_s: float, peak_tokens: float, limits: np.void, start_s: float
) -> int:
    """Reason code for candidate ``i`` of ``table`` after a rollout; ``ADMITTED`` when the whole table is attainable."""
    row, seen = table[i], outlook[i]
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
def check(coef: np.ndarray, limits: np.void, table: np.ndarray, i: int, start_s: float, outlook: np.ndarray) -> int:
    """Reason code for request ``i`` beside all others of ``table``: may it be promised without breaking a promise."""
    worst_s, peak_tokens = rollout(coef, table, start_s, limits, -TOLERANCE_S, outlook)
    return why_unattainable(table, i, outlook, worst_s, peak_tokens, limits, start_s)


@njit(cache=True)
def admit_in_order(
    coef: np.ndarray, limits: np.void, table: np.ndarray, running: int, start_s: float, outlook: np.ndarray
) -> np.ndarray:
    """Try ``table[running:]`` one by one, earliest prefill deadline first; returns a reason code for each."""
    due_s = np.empty(len(table) - running)
    for j in range(len(due_s)):
        due_s[j] = next_due_s(table[running + j], start_s)
    reasons = np.zeros(len(due_s), dtype=np.int64)
    chosen = np.empty(len(table), dtype=np.int64)
    chosen[:running] = np.arange(running)
    count = running
    for j in np.argsort(due_s, kind="mergesort"):
        chosen[count] = running + j
        seen = np.zeros(count + 1, dtype=OUTLOOK)
        reasons[j] = check(coef, limits, table[chosen[: count + 1]], count, start_s, seen)
        if reasons[j] == ADMITTED:
            count += 1
            for place in range(count):
                outlook[chosen[place]] = seen[place]
    return reasons


def plan_admission(
    coef: np.ndarray,
    limits: np.void,
    running: np.ndarray,
    new: np.ndarray,
    start_s: float,
    options: AdmissionOptions = AdmissionOptions(),
) -> AdmissionPlan:
    """Choose which of ``new`` to admit beside ``running`` (both request tables) from ``start_s`` on.

    ``start_s`` is the end of the iteration in flight and ``running`` the state at that time, waiting requests included.
    """
    table = np.concatenate((running, new))
    outlook = np.zeros(len(table), dtype=OUTLOOK)
    outlook["first_s"] = outlook["tpot_s"] = np.inf
    codes = admit_in_order(coef, limits, table, len(running), start_s, outlook)
    return AdmissionPlan(
        accepted=codes == ADMITTED,
        predicted_ttft_s=outlook["first_s"][len(running) :] - new["arrival_s"],
        predicted_tpot_s=outlook["tpot_s"][len(running) :],
        reasons=tuple(REASONS[code] for code in codes),
        earliest_s=np.full(len(new), np.inf),
        displaced=np.zeros(len(running), dtype=np.bool_),
    )
