"""Drift alarms: when they begin, when they end, and what they set going."""

import msgspec
import numpy as np
import pytest

from controller.drift import BEGINS, CHECK_EVERY, LEAST, LEAST_FIGURE, WINDOW, DriftWatch
from controller.lengths.estimate import LengthOptions
from controller.scaling.tiers import TierTable
from controller.status import fleet_status
from protocol.messages import INF, Outcome, Verdict
from tests.support.fleet_cases import TIGHT, ask, ended, fleet, report


def outcome(ttft_s: float = 1.0, tpot_s: float = 0.1, predicted: tuple[float, float] = (1.0, 0.1)) -> Outcome:
    return Outcome("x", "gold", "gold", "stop", True, ttft_s, tpot_s, 9.0, *predicted, 50, Verdict.ADMITTED)


def test_an_alarm_begins_with_a_clear_excess_and_ends_below_a_smaller_one() -> None:
    watch, told = DriftWatch(), []
    for ttft_s, requests in ((1.0, WINDOW), (2.0, WINDOW), (1.4, WINDOW), (1.0, WINDOW)):
        for _ in range(requests):
            told += watch.note(outcome(ttft_s), None, 5.0)
    assert [(alarm.figure, alarm.is_on) for alarm in told] == [("ttft", True), ("ttft", False)]
    assert told[0].ratio > BEGINS


def test_a_few_requests_single_stalls_and_early_tokens_are_no_alarm() -> None:
    watch = DriftWatch()
    assert not [a for _ in range(LEAST - 1) for a in watch.note(outcome(9.0), None, 0.0)]
    watch = DriftWatch()
    assert not [a for i in range(400) for a in watch.note(outcome(90.0 if i % 3 == 0 else 1.0), None, 0.0)]
    assert not [a for _ in range(400) for a in watch.note(outcome(0.1, 0.01), None, 0.0)]


@pytest.mark.parametrize("predicted_tokens", [10.0, 400.0])
def test_lengths_drift_both_ways(predicted_tokens: float) -> None:
    watch = DriftWatch()
    told = [alarm for _ in range(LEAST + 10) for alarm in watch.note(outcome(), predicted_tokens, 0.0)]
    assert [(alarm.figure, alarm.is_on) for alarm in told] == [("length", True)]


def test_what_was_never_promised_or_has_moved_says_nothing_about_time() -> None:
    watch = DriftWatch()
    for _ in range(100):
        watch.note(msgspec.structs.replace(outcome(9.0), predicted_ttft_s=INF), None, 0.0)
        watch.note(msgspec.structs.replace(outcome(9.0), finish="abort"), 1.0, 0.0)
        watch.note(msgspec.structs.replace(outcome(9.0), was_promised=True, has_moved=True), None, 0.0)
    assert watch.summary(0.0) == {"measured_over_predicted": {}, "alarms": []}


def test_lengths_that_drift_are_in_the_status_and_have_a_forest_grown_anew() -> None:
    state = fleet(lengths=LengthOptions("forest", train_every=10_000))
    state.report(report("a"), 0.0)
    for _ in range(80):
        state.admit([asked := ask(TIGHT)], 0.0)
        state.on_outcome(ended(asked, "stop", 20), 1.0)
    assert state.lengths.training_set() is not None
    assert state.lengths.training_set() is None
    for _ in range(200):
        state.admit([asked := ask(TIGHT)], 2.0)
        state.lengths.live[asked.request_id].answers[0] = (
            state.lengths.live[asked.request_id].answers[0]._replace(mean_tokens=20.0)
        )
        state.on_outcome(ended(asked, "stop", 150), 2.0)
    (alarm,) = [each for each in fleet_status(state, 5.0)["drift"]["alarms"] if each["figure"] == "length"]
    assert alarm["tier"] == "tight"
    assert alarm["ratio"] > BEGINS
    assert state.lengths.training_set() is not None
    assert "length" in [change.reason for change in state.allocation.history][-1]


def test_the_ratio_is_the_median_of_the_latest_requests() -> None:
    watch, rng, ttfts_s = DriftWatch(), np.random.default_rng(1), []
    for _ in range(2 * WINDOW + 7):
        ttfts_s.append(float(rng.lognormal()))
        watch.note(outcome(ttfts_s[-1]), None, 0.0)
    latest = (np.array(ttfts_s[-WINDOW:]) + LEAST_FIGURE["ttft"]) / (1.0 + LEAST_FIGURE["ttft"])
    told = watch.summary(0.0)["measured_over_predicted"]["gold"]["ttft"]
    assert told == round(float(np.exp(np.median(np.log(latest)))), 3)


def test_the_alarm_of_a_tier_that_a_deploy_removed_is_gone() -> None:
    """No request of it came by which it could have ended, so it stood for ever."""
    state = fleet()
    state.report(report("a"), 0.0)
    for _ in range(LEAST + CHECK_EVERY):
        for tier in ("tight", "loose"):
            state.on_outcome(msgspec.structs.replace(outcome(9.0), tier_asked=tier), 1.0)

    def alarms() -> list[str]:
        return [alarm["tier"] for alarm in fleet_status(state, 5.0)["drift"]["alarms"]]

    assert alarms() == ["loose", "tight"]
    kept = [tier for tier in state.tiers.tiers if tier.name != "tight"]
    assert state.set_tiers(TierTable.of(state.tiers.version + 1, kept), 2.0)
    assert alarms() == ["loose"]
    assert list(fleet_status(state, 5.0)["drift"]["measured_over_predicted"]) == ["loose"]
