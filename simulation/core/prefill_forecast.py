"""What a prefill replica of the simulator will do with its queue."""

import math

import numpy as np
from numba import njit

from planning.batch.prefill_only import form_prefill_batch
from planning.deadlines import next_token_deadline_s, num_uncomputed_tokens
from planning.engine import EngineModel
from planning.forecast.rollout import mark_finished, run_tokens


@njit(cache=True)
def forecast_prefills(engine: EngineModel, table: np.ndarray, start_s: float, first_s: np.ndarray) -> float:
    """When each prompt of a prefill replica will be done (``first_s``, f8[rows]); returns the worst time to spare.

    Every request leaves with its first token: it decodes elsewhere. ``inf`` where a prompt can never run.
    """
    copy, tokens, now_s, worst_s = table.copy(), np.zeros(len(table), dtype=np.int32), start_s, math.inf
    first_s[:] = math.inf
    while True:
        seconds, _mix = form_prefill_batch(engine, copy, now_s, tokens)
        if seconds <= 0.0:
            break
        now_s += seconds
        for i in range(len(copy)):
            if tokens[i] > 0 and run_tokens(copy[i], tokens[i], 0.0, True):
                first_s[i] = now_s
                mark_finished(copy[i])
    for i in range(len(table)):
        if num_uncomputed_tokens(table[i]) > 0 and not table[i]["best_effort"]:
            worst_s = min(worst_s, next_token_deadline_s(table[i], start_s) - first_s[i])
    return worst_s
