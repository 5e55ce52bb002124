"""Attainment counts what was asked for; lengths are learnt from what finished."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from controller.lengths import LengthEstimator
from controller.tracker import Tracker
from controller.wire import Outcome, Scope, Verdict


def outcome(finish: str, met: bool, verdict: Verdict = Verdict.ADMITTED) -> Outcome:
    return Outcome("x", "gold", "gold", finish, met, 0.1, 0.01, 1.0, 0.2, 0.02, 5, verdict)


def test_refused_and_downgraded_are_misses_and_the_departed_do_not_count() -> None:
    tracker = Tracker()
    tracker.note(outcome("stop", True), 0.0)
    tracker.note(outcome("refused", False, Verdict.REFUSED), 0.0)
    tracker.note(outcome("stop", False, Verdict.BEST_EFFORT), 0.0)
    tracker.note(outcome("abort", False), 0.0)
    gold = tracker.summary(1.0)["gold"]
    assert (gold["requests"], gold["met"], gold["refused"], gold["best_effort"], gold["abandoned"]) == (3, 1, 1, 1, 1)
    assert gold["attainment"] == 1 / 3


def test_the_window_forgets_and_the_total_does_not() -> None:
    tracker = Tracker(window_s=10.0)
    tracker.note(outcome("stop", False), 0.0)
    tracker.note(outcome("stop", True), 20.0)
    gold = tracker.summary(21.0)["gold"]
    assert (gold["attainment"], gold["window"]["attainment"]) == (0.5, 1.0)
    assert gold["window"]["ttft_error_ms"]["p50"] == -100.0
    assert tracker.summary(100.0)["gold"]["window"]["attainment"] is None


@given(emitted=st.integers(0, 5000), cap=st.integers(1, 5000), lengths=st.lists(st.integers(1, 4000), max_size=5))
def test_predictions_lie_between_what_was_emitted_and_the_cap(emitted: int, cap: int, lengths: list[int]) -> None:
    estimator = LengthEstimator(100.0, weight=0.5)
    for length in lengths:
        estimator.note("gold", length)
    predicted = estimator.predict("gold", emitted, cap)
    assert emitted < predicted <= max(cap, emitted + 1)


def test_lengths_move_towards_what_finished() -> None:
    estimator = LengthEstimator(100.0, weight=0.5)
    for _ in range(20):
        estimator.note("gold", 10)
    assert estimator.predict("gold", 0, 1000) == 10
    assert estimator.predict("other", 0, 1000) == 100


def test_where_requests_run_to_their_caps_the_cap_is_the_prediction() -> None:
    estimator = LengthEstimator(100.0, weight=0.5)
    for _ in range(5):
        estimator.note("gold", 50, is_cut=True)
    assert [estimator.predict("gold", 0, cap) for cap in (20, 400)] == [20, 400]
    estimator.note("gold", 50)
    assert estimator.predict("gold", 0, 400) < 100, "one that ends by itself is enough, where few are remembered"


def test_a_tiers_own_prior_holds_until_its_requests_have_finished() -> None:
    estimator = LengthEstimator(100.0, {"gold": 20.0}, weight=0.5)
    assert [estimator.predict(tier, 0, 1000) for tier in ("gold", "other")] == [20, 100]
    estimator.note("gold", 40)
    assert estimator.predict("gold", 0, 1000) == 30, "the prior counts as the first one"
    estimator.tier_priors = {"gold": 500.0, "other": 7.0}
    assert [estimator.predict(tier, 0, 1000) for tier in ("gold", "other")] == [30, 7]


def test_a_request_of_several_sequences_counts_once() -> None:
    """100 prompts of one request were 100 requests."""
    tracker = Tracker()
    for scope in (*[Scope.SEQUENCE] * 100, Scope.REQUEST):
        tracker.note(msgspec.structs.replace(outcome("stop", True), scope=scope), 0.0)
    assert tracker.total["gold"].requests == 1
