"""The line of those that have no other: late requests, and best effort that has waited too long. Pure.

A promised request that has missed its line gets a second one, at a pace at which people read. Who has not begun, and
best effort, is ``limits["aging_s"]`` behind. What promises leave goes to late requests first, whoever is furthest
behind this line, so that streams that have begun stay readable; then to best effort. Among those, whoever is older than
``aging_s`` comes first, the eldest before others; the rest go by work. ``limits["best_effort_share"]`` of the time is
left by forecasts at any time, and by batches while one of the first is there.
"""

import math

import numpy as np
from numba import njit

from planning.batch.classes import LATE_DECODE, LATE_PREFILL

READING_S = 0.25  # per token: four tokens a second, about three words


@njit(cache=True)
def second_due_s(row: np.void, limits: np.void) -> float:
    """When the next token of a late request is due by its second line; of best effort, when it has waited too long."""
    if row["best_effort"]:
        return row["arrival_s"] + limits["aging_s"]
    from_s = row["arrival_s"] + (row["ttft_s"] if row["ttft_s"] < math.inf else 0.0)
    if row["emitted_tokens"] == 0:
        return from_s + limits["aging_s"]
    pace_s = max(READING_S, row["tpot_s"]) if row["tpot_s"] < math.inf else READING_S
    return from_s + row["emitted_tokens"] * pace_s


@njit(cache=True)
def second_slack_s(row: np.void, limits: np.void, request_class: int, now_s: float) -> float:
    """Time until the second line; ``inf`` for best effort that is not behind it."""
    left_s = second_due_s(row, limits) - now_s
    is_late = request_class in (LATE_DECODE, LATE_PREFILL)
    return left_s if is_late or left_s < 0.0 else math.inf
