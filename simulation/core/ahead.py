"""When a simulated iteration ends, and when the next one is formed (``planning.lead``)."""

import numpy as np
from numba import njit

from planning.lead import EARLY_ERRORS, SHARE_STEP, formed_ahead_s
from profiles.online_state import ERROR


@njit(cache=True)
def run_for(engine: np.void, limits: np.void, correction: np.ndarray, planned_s: float, seconds: float) -> float:
    """An engine (ENGINE[]) that is free begins an iteration of ``seconds``; returns how long it is busy with it.

    Where it ``forms_late``, the next iteration is formed as long before the planned end as its limits say, and begins
    ``launch_s`` later at the earliest. An iteration that ends before that leaves the device idle, and what it emits
    is seen only then: the engine was busy forming.
    """
    if engine["forms_late"]:
        limits["lead_s"] = engine["launch_s"]
        limits["lead_share"] = SHARE_STEP * np.ceil(EARLY_ERRORS * correction[ERROR] / SHARE_STEP)
        formed_s = max(0.0, planned_s - formed_ahead_s(limits, planned_s))  # from now
        busy_s = max(seconds, formed_s + engine["launch_s"])
        engine["ahead_s"] = busy_s - formed_s
    else:
        busy_s = seconds
        engine["ahead_s"] = formed_ahead_s(limits, seconds)
    engine["free_at_s"] += busy_s
    return busy_s
