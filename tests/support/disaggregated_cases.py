"""Disaggregated fleets and their replicas, for tests of the controller."""

import msgspec

from controller.disaggregation.fleet import DisaggregatedFleet, make_fleet
from controller.disaggregation.phases import PhaseOptions
from controller.options import FleetOptions
from controller.scaling.tiers import TierTable
from profiles.store import load_profile
from protocol.messages import AdmissionRequest, Decision, Progress
from tests.support.fleet_cases import TIERS, TIGHT, report


def fleet(replicas: str = "pqdef", prefill: int = 2, tiers: TierTable = TIERS, **options: object) -> DisaggregatedFleet:
    """Replicas named by one letter each; the first two prefill."""
    chosen = FleetOptions(length_prior_tokens=100.0, phases=PhaseOptions(prefill, adapt=False), **options)  # type: ignore[arg-type]
    state = make_fleet(chosen, tiers, load_profile)
    assert isinstance(state, DisaggregatedFleet)
    for name in replicas:
        state.report(report(name), 0.0)
    return state


def second(asked: AdmissionRequest) -> AdmissionRequest:
    """The question after the first token."""
    return msgspec.structs.replace(asked, emitted_tokens=1, transferred_kv_tokens=asked.prompt_tokens, age_s=0.1)


def one(state: DisaggregatedFleet, asked: AdmissionRequest, now_s: float = 0.0) -> Decision:
    (decision,) = state.admit([asked], now_s)
    state.check_integrity()
    return decision


def full(state: DisaggregatedFleet, names: str, now_s: float) -> None:
    """Replicas whose KV cache is promised away."""
    busy = tuple(Progress(f"{i}", TIGHT, 1.0, 7000, 7100, 101, 150, 200, True) for i in range(56))
    for name in names:
        mine = tuple(msgspec.structs.replace(each, request_id=f"{name}{each.request_id}") for each in busy)
        state.report(report(name, int(now_s * 1000) + 2, mine), now_s)
