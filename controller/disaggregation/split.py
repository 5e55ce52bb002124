"""What prefilling on one replica and decoding on another makes of a request: two, each with its own objective. Pure."""

from collections.abc import Collection, Iterable

import msgspec
import numpy as np

from planning.admission.search import ADMITTED
from planning.deadlines import PREFILL_TOKENS_PER_STEP
from planning.engine import EngineModel
from protocol.messages import INF, AdmissionRequest, Slo
from routing.fleet_state import FleetState
from routing.placement import NOWHERE, tier_distance
from routing.quick_check import quick_check


def prefill_slo(slo: Slo, prompt_tokens: int, output_tokens: int, transfer_s: float = 0.0) -> Slo:
    """The objective of the prefill alone: its first token in time, and early enough for the rest to meet its line.

    The KV cache travels for ``transfer_s`` before the second token. Of what is left of an end-to-end deadline it gets
    its share of the work, as ``planning.deadlines.rate_due_s`` spreads it.
    """
    steps = (prompt_tokens - 1) / PREFILL_TOKENS_PER_STEP
    share = (1.0 + steps) / (max(output_tokens, 1) + steps)
    by_line_s = slo.ttft_s - max(0.0, transfer_s - slo.tpot_s)
    by_deadline_s = (slo.e2e_s - transfer_s) * share
    return msgspec.structs.replace(slo, ttft_s=max(0.0, min(by_line_s, by_deadline_s)), tpot_s=INF, e2e_s=INF)


def prefill_part(request: AdmissionRequest, output_tokens: int, transfer_s: float = 0.0) -> AdmissionRequest:
    """The question about the prefill of a request whose whole output is predicted at ``output_tokens``."""
    return msgspec.structs.replace(
        request, slo=prefill_slo(request.slo, request.prompt_tokens, output_tokens, transfer_s), max_tokens=1
    )


def ready_row(row: np.ndarray) -> np.ndarray:
    """A request (REQUEST[]) as it will be once its prompt is computed and its first token is out."""
    ready = row.copy()
    ready["emitted_tokens"], ready["computed_tokens"], ready["running"] = 1, row["prompt_tokens"], True
    ready["output_tokens"] = np.maximum(ready["output_tokens"], 2)
    return ready


def has_kv_room(fleet_state: FleetState, kv_tokens: int) -> np.ndarray:
    """Which replicas could hold so many more KV tokens, best effort making room, and have a sequence free (bool[R])."""
    state, limits = fleet_state.replicas, fleet_state.limits
    has_sequence = state["count"] - state["best_effort"] < limits["max_running"]
    fits: np.ndarray = has_sequence & (state["held_tokens"] + kv_tokens <= limits["kv_capacity_tokens"])
    return fits


def decode_slot(
    fleet_state: FleetState, slots: Iterable[int], may_join: Collection[int], row: np.ndarray, now_s: float
) -> int:
    """Which of these replicas has room for the request (REQUEST[]) once its prompt is computed; ``NOWHERE``: none.

    Its own tier's are asked first, then as ``tier_distance`` orders them, at last those that ``may_join`` its tier. By
    the cached sums only: when the time comes, others will have left and come.
    """
    ready, fits = ready_row(row[None])[0], has_kv_room(fleet_state, int(row["prompt_tokens"]))
    groups = {slot: tier_distance(int(fleet_state.replicas["tier"][slot]), int(row["tier"])) for slot in slots}
    suited = sorted((slot for slot in groups if groups[slot] >= 0), key=groups.__getitem__)
    for slot in (*suited, *(slot for slot in groups if groups[slot] < 0 and slot in may_join)):
        engine = EngineModel(fleet_state.pessimistic_coefs[slot], fleet_state.limits[slot])
        if fits[slot] and quick_check(engine, fleet_state.replicas[slot], ready, now_s) == ADMITTED:
            return slot
    return NOWHERE
