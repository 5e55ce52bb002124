"""What an idle replica could do for a request: the one that suits it best by a closed form, and that one exactly.

Every replica has a model of its own once its coefficients are corrected online, so what they could do is never known
from another one. The closed form, of a prefill in the largest chunks and a steady decode, puts them in order.
"""

import math

import numpy as np
from numba import boolean, float64, intp, njit

from planning.admission.search import ADMITTED, DEADLINE, KV_FULL, TPOT, TTFT, why_unattainable
from planning.batch.classes import decode_step_s, prefill_s
from planning.batch.speculation import drafts_to_promise, promised_step
from planning.deadlines import remaining_tokens
from planning.engine import EngineModel
from planning.forecast.rollout import FORECAST, FORECASTS_TYPE, TOLERANCE_S, forecast_requests
from planning.limits import usable_kv_tokens
from planning.tables import REQUEST, ROW_TYPE, TABLE_TYPE, RequestTable
from profiles.compiled_once import compiled_once
from routing.fleet_state import FLEET_TYPE, FleetState, engine_of
from routing.placement import NOWHERE, tier_distance


@compiled_once(intp(FLEET_TYPE, ROW_TYPE, float64, boolean))
def best_idle(fleet: FleetState, row: np.void, start_s: float, is_any_tier: bool) -> int:
    """The open replica on which the request would have the most time to spare if nothing else were there.

    Ties go to the faster decoder, then to the lower slot. Those that lack KV or are too slow for its TPOT come last.
    ``is_any_tier``: whether it may be of a tier that the request could not join.
    """
    best, best_suits, best_spare_s, best_step_s = NOWHERE, False, 0.0, 0.0
    kv_tokens, gaps = row["prompt_tokens"] + row["output_tokens"], remaining_tokens(row) - 1
    for r in range(len(fleet.replicas)):
        replica = fleet.replicas[r]
        if not replica["is_open"] or not (is_any_tier or tier_distance(replica["tier"], row["tier"]) >= 0):
            continue
        coef, limits = fleet.pessimistic_coefs[r], fleet.limits[r]
        step_tokens, gain = promised_step(EngineModel(coef, limits), row, start_s, 0.0, 0.0)
        first_s, step_s = start_s + prefill_s(coef, limits, row), decode_step_s(coef, row, step_tokens) / gain
        spare_s = min(row["arrival_s"] + row["ttft_s"] - first_s, row["deadline_s"] - first_s - gaps * step_s)
        suits = kv_tokens <= usable_kv_tokens(limits) and step_s <= row["tpot_s"]
        is_better = best == NOWHERE or (suits and not best_suits)
        if suits == best_suits and (spare_s > best_spare_s or (spare_s == best_spare_s and step_s < best_step_s)):
            is_better = True
        if is_better:
            best, best_suits, best_spare_s, best_step_s = r, suits, spare_s, step_s
    return best


@njit(cache=True)
def idle_prefill_s(fleet: FleetState, r: int, prompt_tokens: int) -> float:
    """Seconds that replica ``r`` takes for a prompt if nothing else is there, by what its iterations usually take."""
    alone = np.zeros(1, dtype=REQUEST)
    alone[0]["prompt_tokens"] = prompt_tokens
    return prefill_s(fleet.coefs[r], fleet.limits[r], alone[0])


@compiled_once(intp(FLEET_TYPE, intp, TABLE_TYPE, float64, FORECASTS_TYPE))
def _forecast_alone(fleet: FleetState, r: int, alone: RequestTable, start_s: float, seen: np.ndarray) -> int:
    """Reason code of the one request (REQUEST[1]) on replica ``r``, idle from ``start_s`` on; fills its drafts in, and
    ``seen`` (FORECAST[1]).

    A record of an array does not keep that array alive in compiled code, so that the array itself is passed on.
    """
    limits = fleet.limits[r]
    engine = EngineModel(fleet.pessimistic_coefs[r], limits)
    alone[0]["spec_tokens"] = drafts_to_promise(engine, alone[0], start_s, 0.0, 0.0)
    worst_s, peak_tokens = forecast_requests(engine, alone, start_s, -TOLERANCE_S, seen)
    return int(why_unattainable(alone[0], seen[0], worst_s, peak_tokens, limits))


@njit(cache=True)
def latest_start_s(fleet: FleetState, row: np.void, now_s: float, unbound_s: float) -> float:
    """When a request must start at the latest on an idle replica of the fleet; -inf where none could attain it.

    As much later than now as its first token by TTFT, and its predicted end by its deadline, would come too early; one
    that bounds neither waits until ``unbound_s`` after its arrival.
    """
    seen, r = np.zeros(1, dtype=FORECAST), best_idle(fleet, row, now_s, False)
    alone = np.zeros(1, dtype=REQUEST)
    alone[0] = row
    if r == NOWHERE or _forecast_alone(fleet, r, alone, now_s, seen) != ADMITTED:
        return -math.inf
    first_s, gaps = seen[0]["first_s"], remaining_tokens(row) - 1
    spare_s = min(row["arrival_s"] + row["ttft_s"] - first_s, row["deadline_s"] - (first_s + gaps * seen[0]["tpot_s"]))
    return float(now_s + spare_s if spare_s < math.inf else row["arrival_s"] + unbound_s)


@njit(cache=True)
def at_best(fleet: FleetState, row: np.void, now_s: float) -> tuple[int, float, float]:
    """Reason code of a request if an open replica had nothing else to do and the request came now: on the one that
    suits it best.

    And the TTFT and the TPOT in seconds that it would have there; inf where none is open, or its KV cache is too small.
    """
    fresh, seen = np.zeros(1, dtype=REQUEST), np.zeros(1, dtype=FORECAST)
    fresh[0] = row
    fresh[0]["deadline_s"] += now_s - row["arrival_s"]
    fresh[0]["arrival_s"] = now_s
    r = best_idle(fleet, fresh[0], now_s, True)
    if r == NOWHERE:
        return TTFT, math.inf, math.inf
    reason = _forecast_alone(fleet, r, fresh, now_s, seen)
    if reason != ADMITTED:  # late requests are not forecast: with all the time there is, this one is
        fresh[0]["ttft_s"] = fresh[0]["deadline_s"] = math.inf
        _worst_s, peak_tokens = forecast_requests(engine_of(fleet, r), fresh, now_s, -math.inf, seen)
        if peak_tokens > usable_kv_tokens(fleet.limits[r]):
            return KV_FULL, math.inf, math.inf
        if reason == TTFT and seen[0]["first_s"] - now_s <= row["ttft_s"]:  # late at once, for another part
            reason = DEADLINE if row["deadline_s"] < math.inf else TPOT
    return reason, seen[0]["first_s"] - now_s, seen[0]["tpot_s"]
