"""A TTFT as a slowdown: what it amounts to for each prompt, and that all that is decided goes by it."""

import msgspec
import numpy as np
import pytest

from controller.disaggregation.fleet import make_fleet
from controller.disaggregation.phases import PhaseOptions
from controller.fleet import Fleet
from controller.options import FleetOptions
from controller.scaling.demand import Hardware, Load, queue_s
from controller.scaling.tiers import Tier, TierTable
from controller.slowdown import idle_ttft_s
from planning.batch.classes import prefill_s
from planning.tables import request_table
from profiles.store import load_profile
from protocol.messages import INF, Slo, Verdict
from tests.support.fleet_cases import H200, ask, group, report

A100 = "a100_sxm__llama-3.1-8b"
SCALED = Slo(INF, 0.1, tier="scaled", ttft_slowdown=3.0)
TIERS = TierTable.of(1, [Tier("scaled", tpot_s=0.1, ttft_slowdown=3.0), Tier("flex", best_effort=True)])


def fleet(**options: object) -> Fleet:
    made = make_fleet(FleetOptions(length_prior_tokens=100.0, pending=False, **options), TIERS, load_profile)  # type: ignore[arg-type]
    made.report(report("fast"), 0.0)
    made.report(msgspec.structs.replace(report("slow"), profile=A100), 0.0)
    return made


def alone_s(made: Fleet, name: str, prompt_tokens: int) -> float:
    """The prefill of a fresh prompt on a replica with nothing else to do."""
    row, replica = request_table(1), made.replicas[name]
    row["prompt_tokens"] = prompt_tokens
    return float(prefill_s(made.slots.fleet_state.coefs[replica.slot], replica.limits, row[0]))


@pytest.mark.parametrize("prompt_tokens", [20, 500, 6000, 30_000])
def test_it_is_a_multiple_of_this_prompt_on_the_fastest_profile(prompt_tokens: int) -> None:
    made = fleet()
    (decision,) = made.admit([ask(SCALED, prompt_tokens)], 1.0)
    assert alone_s(made, "fast", prompt_tokens) < alone_s(made, "slow", prompt_tokens)
    assert decision.verdict == Verdict.ADMITTED
    assert decision.ttft_s == pytest.approx(3.0 * alone_s(made, "fast", prompt_tokens))
    (row,) = made.replicas[decision.replica].table
    assert row["ttft_s"] == decision.ttft_s, "it is planned by that"


def test_it_follows_the_online_correction_by_the_median_replica() -> None:
    made = fleet()
    for name in ("b", "c"):
        made.report(report(name), 0.0)
    before_s = idle_ttft_s(500, made.replicas)
    coefs = made.slots.fleet_state.coefs
    coefs[made.replicas["fast"].slot] *= 0.2  # a lucky one of three does not count
    assert idle_ttft_s(500, made.replicas) == before_s
    for name in ("b", "c"):
        coefs[made.replicas[name].slot] *= 1.5
    assert idle_ttft_s(500, made.replicas) == pytest.approx(1.5 * before_s)


def test_what_a_cache_holds_of_the_prompt_tightens_nothing() -> None:
    made = fleet(prefix_affinity=1.0)
    first, again = ask(SCALED, 3000, prefix=(1, 2, 3)), ask(SCALED, 3000, prefix=(1, 2, 3))
    (one,) = made.admit([first], 1.0)
    (two,) = made.admit([again], 1.1)
    assert one.ttft_s == two.ttft_s


def test_sequences_of_one_request_have_the_ttft_of_the_longest_prompt() -> None:
    made = fleet()
    short, long = group(SCALED, 2)
    told = made.admit([short, msgspec.structs.replace(long, prompt_tokens=4000)], 1.0)
    assert {d.ttft_s for d in told} == {3.0 * idle_ttft_s(4000, made.replicas)}


def test_a_deadline_bounds_it_and_a_tight_one_is_not_promised() -> None:
    made = fleet()
    bounded = msgspec.structs.replace(SCALED, e2e_s=0.01)
    assert made.admit([ask(bounded, 30_000)], 1.0)[0].ttft_s == 0.01
    hasty = msgspec.structs.replace(SCALED, ttft_slowdown=0.5)
    (decision,) = made.admit([ask(hasty, 3000)], 1.0)
    assert (decision.verdict, decision.reason) == (Verdict.BEST_EFFORT, "ttft_unattainable")


def test_without_replicas_nothing_is_known_and_figures_stay_as_they_are() -> None:
    empty = Fleet(FleetOptions(pending=False), TIERS, load_profile)
    assert empty.admit([ask(SCALED)], 1.0)[0].ttft_s == INF
    assert fleet().admit([ask(Slo(0.4, 0.1, tier="scaled"))], 1.0)[0].ttft_s == 0.4


def test_both_parts_of_a_disaggregated_request_tell_that_of_the_whole() -> None:
    made = fleet(phases=PhaseOptions(prefill=1, transfer_s_per_token=1e-6))
    asked = ask(SCALED, 500)
    (prefill,) = made.admit([asked], 1.0)
    assert prefill.prefill_only
    assert prefill.ttft_s == pytest.approx(3.0 * idle_ttft_s(500, made.replicas))
    settled = msgspec.structs.replace(SCALED, ttft_s=prefill.ttft_s, ttft_slowdown=0.0)
    moved = msgspec.structs.replace(asked, slo=settled, emitted_tokens=1, transferred_kv_tokens=500)
    assert made.admit([moved], 1.1)[0].ttft_s == prefill.ttft_s


def test_a_queue_is_due_within_what_its_mean_prompt_may_take() -> None:
    hardware = Hardware(np.array(load_profile(H200).coefficients), 400_000, 0.2)
    (scaled, _), load = TIERS.tiers, Load(1.0, 20_000.0, 100.0)
    assert queue_s(scaled, load, hardware) == pytest.approx(3.0 * hardware.prompt_s(20_000.0))
    assert queue_s(Tier("plain", tpot_s=0.1), load, hardware) == 10.0
