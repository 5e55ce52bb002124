"""What the cached sums of a replica say about adding a request, before a forecast is made."""

import math

import numpy as np
from numba import njit

from planning.admission.search import ADMITTED, BREAKS, KV_FULL, TTFT
from planning.batch.classes import prefill_s
from planning.batch.kv import wanted_kv_tokens
from planning.batch.speculation import promised_step
from planning.deadlines import dslo_due_s, next_token_deadline_s, num_uncomputed_tokens, remaining_tokens
from planning.engine import EngineModel
from planning.limits import usable_kv_tokens
from routing.fleet_state import SHORTEST_S, decode_rest_s, utilization

QUICK_CHECK_UTILIZATION = 1.1  # utilization up to which the quick check lets a request through to the forecast


@njit(cache=True)
def _max_tpot_s(row: np.void, start_s: float, alone_s: float) -> float:
    """Pace of a newcomer's decodes if its first token comes as soon as can be: the others may be later by that."""
    gaps, pace_s = max(1, remaining_tokens(row) - 1), math.inf if row["best_effort"] else row["tpot_s"]
    if row["ttft_s"] < math.inf:
        pace_s += max(0.0, dslo_due_s(row, start_s) - start_s - alone_s) / gaps
    return float(min(pace_s, (row["deadline_s"] - start_s - alone_s) / gaps))


@njit(cache=True)
def quick_check(engine: EngineModel, replica: np.void, row: np.void, now_s: float) -> int:
    """What the cached sums say about adding the request: ``ADMITTED`` for possible, or what stands against it.

    Decoding counts as a fluid that every request draws at its own pace. Errs on the side of ``ADMITTED``: a forecast
    has the last word, and departures soon make room that the sums do not know of. But KV blocks must be free now: what
    lacks them waits at the ingress, if it may, and asks again.
    """
    coef, limits = engine.coef, engine.limits
    todo, start_s = num_uncomputed_tokens(row), max(now_s, replica["free_at_s"])
    if replica["held_tokens"] + wanted_kv_tokens(row, limits["block_tokens"]) > usable_kv_tokens(limits):
        return KV_FULL
    if replica["count"] - replica["best_effort"] >= limits["max_running"]:
        return TTFT  # it would wait for others to leave, and when they do is a guess
    window_s, alone_s = next_token_deadline_s(row, start_s) - start_s, prefill_s(coef, limits, row)
    if window_s < alone_s:
        return TTFT
    step_tokens, gain = promised_step(engine, row, start_s, replica["decodes"], replica["decode_kv_tokens"])
    own_s = _max_tpot_s(row, start_s, alone_s) * gain
    step_s = max(SHORTEST_S, min(replica["pace_s"], limits["max_iteration_s"]))  # until its prompt is computed
    token_rate = replica["token_rate"] + step_tokens / max(own_s, SHORTEST_S)
    rest_rate = replica["rest_rate"] + decode_rest_s(coef, row) / max(own_s, SHORTEST_S)
    if utilization(coef, token_rate, rest_rate, max(SHORTEST_S, min(step_s, own_s))) > QUICK_CHECK_UTILIZATION:
        return BREAKS
    free_share = max(
        0.0, QUICK_CHECK_UTILIZATION - utilization(coef, replica["token_rate"], replica["rest_rate"], step_s)
    )
    return ADMITTED if todo * replica["prompt_token_s"] <= free_share * (window_s + step_s) else TTFT
