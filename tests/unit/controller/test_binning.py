"""Tiers of requests that state a deadline and name none."""

import msgspec
import pytest

from controller.binning import in_own_tier, needed_tpot_s
from controller.disaggregation.fleet import make_fleet
from controller.disaggregation.phases import PhaseOptions
from controller.lengths.estimate import LengthOptions
from controller.lengths.fleet_lengths import FleetLengths
from controller.options import FleetOptions
from controller.scaling.tiers import Tier, TierTable
from profiles.store import load_profile
from protocol.messages import INF, Slo, Verdict
from tests.support.fleet_cases import ask, report

TIERS = TierTable.of(
    1, [Tier("tight", 0.3, 0.03), Tier("loose", 3.0, 0.1), Tier("report", e2e_s=60.0), Tier("flex", best_effort=True)]
)


def open_slo(e2e_s: float, ttft_s: float = INF, tpot_s: float = INF) -> Slo:
    """As the ingress resolves it: in the loosest tier that its TPOT allows."""
    return Slo(ttft_s, tpot_s, e2e_s, TIERS.tiers[TIERS.bin(tpot_s)].name, is_tier_open=True)


@pytest.mark.parametrize(
    ("slo", "tier"),
    [
        (open_slo(60.0), "loose"),
        (open_slo(6.0), "tight"),
        (open_slo(12.0, ttft_s=1.0), "loose"),
        (open_slo(10.5, ttft_s=1.0), "tight"),
        (open_slo(1.0), "tight"),  # tighter than all: the tightest there is
        (open_slo(60.0, tpot_s=0.05), "tight"),
        (open_slo(5.0, tpot_s=0.2), "tight"),
        (msgspec.structs.replace(open_slo(6.0), is_tier_open=False), "report"),  # it was named
    ],
)
def test_the_tier_is_that_of_the_pace_that_is_needed(slo: Slo, tier: str) -> None:
    settled = in_own_tier(ask(slo), TIERS, FleetLengths(LengthOptions(), 101.0, {}))
    assert (settled.slo.tier, settled.slo.is_tier_open) == (tier, False)
    assert settled.slo.e2e_s == slo.e2e_s


def test_a_ttft_that_only_repeats_the_deadline_leaves_time_for_the_rest() -> None:
    assert needed_tpot_s(Slo(10.0, e2e_s=10.0), 1, 100) == pytest.approx(0.1)


def test_it_goes_by_the_length_that_is_predicted_and_never_by_age() -> None:
    lengths = FleetLengths(LengthOptions(), 1001.0, {})
    asked = msgspec.structs.replace(ask(open_slo(60.0)), max_tokens=4000)
    assert in_own_tier(asked, TIERS, lengths).slo.tier == "tight"
    assert in_own_tier(msgspec.structs.replace(asked, max_tokens=100), TIERS, lengths).slo.tier == "loose"
    again = msgspec.structs.replace(asked, age_s=30.0, emitted_tokens=900)
    assert in_own_tier(again, TIERS, lengths).slo.tier == "tight"


@pytest.mark.parametrize("phases", [None, PhaseOptions(prefill=1, adapt=False)])
def test_the_decision_names_the_tier_and_its_replica_serves_it(phases: PhaseOptions | None) -> None:
    own = [msgspec.structs.replace(tier, num_replicas=not tier.best_effort) for tier in TIERS.tiers]
    state = make_fleet(FleetOptions(length_prior_tokens=101.0, phases=phases), TierTable.of(1, own), load_profile)
    names = "pabc" if phases else "abc"
    for name in names:
        state.report(report(name), 0.0)
    asked = ask(open_slo(6.0))
    (decision,) = state.admit([asked], 0.0)
    assert (decision.verdict, decision.tier) == (Verdict.ADMITTED, "tight")
    if phases:
        then = msgspec.structs.replace(asked, emitted_tokens=1, transferred_kv_tokens=500, age_s=0.1)
        (decision,) = state.admit([then], 0.1)
    assert (decision.tier, decision.replica) == ("tight", "a")
