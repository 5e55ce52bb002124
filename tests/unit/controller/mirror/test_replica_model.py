"""The mirror of one replica."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from controller.calibration import Calibration
from controller.fleet import Fleet
from controller.lengths.estimate import LengthOptions
from controller.lengths.fleet_lengths import FleetLengths
from controller.mirror.replica_model import VirtualReplica
from controller.mirror.slots import ReplicaSlots
from controller.options import FleetOptions
from controller.status import fleet_status
from planning.tables import has_begun
from profiles.store import load_profile
from protocol.messages import LIVE_STRETCH, Slo, Step, Verdict, request_uid
from tests.support.fleet_cases import H200, LOOSE, TIERS, ask, fleet, in_progress, report
from tests.support.planted_profile import SPREAD

LENGTHS = FleetLengths(LengthOptions(), 100.0, {})


def test_limits_follow_the_reports_and_the_slack_margin_stays() -> None:
    replica = VirtualReplica(report("a"), load_profile(H200), ReplicaSlots(), 0.0)
    assert [replica.limits[name] for name in ("block_tokens", "best_effort_stretch")] == [16, LIVE_STRETCH]
    slow = tuple(Step(100.0, 1e4, 0.0, 100.0, 0.0, seconds) for seconds in (0.01, 0.1) * 50)
    replica.sync(report("a", 2, steps=slow), LENGTHS, TIERS, Calibration(), 0.1)
    assert (margin := float(replica.limits["slack_margin"])) > 0.0
    told = dict(block_tokens=32, max_iteration_s=0.1, best_effort_share=0.25, best_effort_stretch=2.0)
    told |= dict(drafts=4, acceptance=0.6, kv_capacity_tokens=9000, max_running=7, max_batch_tokens=512)
    told |= dict(steps_in_flight=2, lead_s=0.003, lead_share=0.2)
    replica.sync(msgspec.structs.replace(report("a", 3), **told), LENGTHS, TIERS, Calibration(), 0.2)
    assert {name: replica.limits[name] for name in told} == told
    assert replica.limits["slack_margin"] == margin


@pytest.mark.parametrize(("lead", "ahead_s"), [({}, 0.1), ({"lead_s": 0.003, "lead_share": 0.2}, 0.023)])
def test_a_newcomer_waits_for_the_iteration_that_is_formed_before_it(lead: dict, ahead_s: float) -> None:
    replica = VirtualReplica(report("a"), load_profile(H200), ReplicaSlots(), 0.0)
    steps = (Step(100.0, 1e4, 0.0, 100.0, 0.0, 0.1),)
    told = msgspec.structs.replace(report("a", 2, steps=steps), steps_in_flight=2, iteration_age_s=0.01, **lead)
    replica.sync(told, LENGTHS, TIERS, Calibration(), 0.1)
    assert replica.state["ahead_s"] == pytest.approx(ahead_s)
    assert replica.formed_ahead_s >= ahead_s


def test_forecasts_begin_as_careful_as_the_spread_of_the_profile_asks_for() -> None:
    exact, spread = load_profile(H200), replace(load_profile(H200), spread=SPREAD)
    plain, careful = (VirtualReplica(report("a"), each, ReplicaSlots(), 0.0) for each in (exact, spread))
    np.testing.assert_array_equal(plain.pessimistic_coefs, exact.coefficients)
    assert plain.limits["slack_margin"] == 0.0
    ratio = careful.pessimistic_coefs[:6] / exact.coefficients[:6]
    assert ratio == pytest.approx(1.16, abs=0.02)  # the mean of |normal| at sigma 0.2, of the kind that strays more
    assert careful.limits["slack_margin"] > 1.0


def test_the_status_tells_how_far_iterations_stray_by_kind_of_batch() -> None:
    state = Fleet(FleetOptions(), TIERS, load_profile)
    state.report(report("a"), 0.0)
    (row,) = fleet_status(state, 0.0)["replicas"]
    assert row["iteration_spread"] == {"decode": {"iterations": 0}, "prefill": {"iterations": 0}}
    steps = tuple(Step(100.0, 1e4, 0.0, 100.0, 0.0, 0.01 if k % 10 else 0.02) for k in range(400))
    state.report(report("a", 2, steps=steps), 0.1)
    (row,) = fleet_status(state, 0.1)["replicas"]
    told = row["iteration_spread"]["decode"]
    assert told["iterations"] == 400
    assert told["p50"] < 1.1 < 1.5 < told["p95"] <= told["p99"]


def test_what_came_during_an_iteration_is_no_part_of_it() -> None:
    """Reports tell requests as they were when it began, and who has come since; the controller knows when."""
    state, long, late = fleet(), ask(LOOSE, 6000), ask(LOOSE, 500)
    state.report(report("a", 1, in_progress(long)), 10.0)
    assert state.admit([late], 10.02)[0].verdict == Verdict.ADMITTED
    state.report(report("a", 2, in_progress(long) + in_progress(late), age_s=0.05), 10.05)
    (replica,) = state.replicas.values()
    state.admit([ask(LOOSE)], 10.06)
    begun = dict(zip(replica.table["id"].tolist(), has_begun(replica.table).tolist(), strict=True))
    assert begun[request_uid(long.request_id)]
    assert not begun[request_uid(late.request_id)]
    assert replica.state["free_at_s"][0] > 10.1


def test_a_report_says_which_iteration_is_in_flight_and_how_far_they_stray() -> None:
    state = fleet()
    busy = in_progress(ask(LOOSE, 6000))
    slow = tuple(Step(100.0, 1e4, 0.0, 100.0, 0.0, seconds) for seconds in (0.01, 0.1) * 50)
    state.report(report("a", requests=busy, age_s=0.0), 0.0)
    (replica,) = state.replicas.values()
    assert replica.state["error"] == 0.0
    state.admit([ask(LOOSE)], 1.0)
    assert replica.state["formed"] > 1
    assert replica.state["flight_s"] > 0.0
    state.report(report("a", 2, requests=busy, steps=slow, age_s=0.001), 1.0)
    assert (replica.state["formed"], replica.state["flight_s"]) == (0, 0.0)
    state.admit([ask(LOOSE)], 1.0005)
    assert replica.state["formed"] == 1
    coefs = replica.slots.fleet_state.coefs[replica.slot]
    assert replica.state["error"] > 0.1
    assert replica.state["error"] == pytest.approx(replica.pessimistic_coefs[0] / coefs[0] - 1.0)


def test_a_decision_tells_the_chance_that_its_first_token_comes_in_time() -> None:
    chances = []
    for error in (0.0, 0.3):
        state = fleet()
        state.report(report("a"), 0.0)
        (replica,) = state.replicas.values()
        replica.state["error"] = error
        (exact,) = state.admit([ask(Slo(10.0, 0.1, tier="loose"), 6000)], 0.0)
        (near,) = state.admit([ask(Slo(1.02 * exact.predicted_ttft_s, 0.1, tier="loose"), 500)], 0.0)
        assert near.verdict == Verdict.ADMITTED
        chances.append(near.chance)
    assert chances[0] == 1.0
    assert 0.5 < chances[1] < 1.0
