"""The tier of a request that states a deadline and names no tier: the one of the pace that it needs. Pure.

Only the controller can tell, because the pace depends on the predicted length of the output.
"""

from collections.abc import Iterable

import msgspec

from controller.disaggregation.split import prefill_slo
from controller.lengths.fleet_lengths import FleetLengths
from controller.scaling.tiers import TierTable
from protocol.messages import AdmissionRequest, Slo


def needed_tpot_s(slo: Slo, prompt_tokens: int, output_tokens: int) -> float:
    """Seconds per token after the first that TPOT and deadline together ask for, if the first one comes when due."""
    left_s = slo.e2e_s - prefill_slo(slo, prompt_tokens, output_tokens).ttft_s
    return min(slo.tpot_s, max(0.0, left_s) / max(1, output_tokens - 1))


def in_tiers(batch: Iterable[AdmissionRequest], tiers: TierTable, lengths: FleetLengths) -> list[AdmissionRequest]:
    """The questions with their tiers settled."""
    return [in_own_tier(request, tiers, lengths) for request in batch]


def in_own_tier(request: AdmissionRequest, tiers: TierTable, lengths: FleetLengths) -> AdmissionRequest:
    """The question with its tier settled: by the age of the request it does not change."""
    if not request.slo.is_tier_open or not tiers.pool:
        return request
    output_tokens = lengths.mean_tokens(request)
    position = tiers.bin(needed_tpot_s(request.slo, request.prompt_tokens, output_tokens))
    slo = msgspec.structs.replace(request.slo, tier=tiers.tiers[position].name, is_tier_open=False)
    return msgspec.structs.replace(request, slo=slo)
