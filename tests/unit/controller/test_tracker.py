"""Attainment counts what was asked for; lengths are learnt from what finished."""

from typing import Any

import msgspec
import pytest

from controller.tracker import Tracker
from protocol.messages import INF, Outcome, Scope, Verdict


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


def test_promises_are_what_was_admitted_with_a_prediction() -> None:
    tracker = Tracker()
    unchecked = msgspec.structs.replace(outcome("stop", True), predicted_ttft_s=INF)
    for each in (
        outcome("stop", True),
        outcome("stop", False),
        outcome("error", False),
        outcome("abort", False),
        outcome("stop", True, Verdict.BEST_EFFORT),
        outcome("refused", False, Verdict.REFUSED),
        unchecked,
    ):
        tracker.note(each, 0.0)
    gold = tracker.summary(1.0)["gold"]
    assert (gold["promised"], gold["kept"], gold["kept_share"]) == (3, 1, 1 / 3)
    assert gold["window"]["kept_share"] == 1 / 3


def test_a_promise_that_a_replica_broke_counts_as_made_and_its_times_test_no_prediction() -> None:
    tracker = Tracker()
    moved = msgspec.structs.replace(outcome("stop", False, Verdict.BEST_EFFORT), was_promised=True, has_moved=True)
    lost = msgspec.structs.replace(outcome("error", False), was_promised=True, has_moved=True)
    for each in (outcome("stop", True), moved, lost):
        tracker.note(each, 0.0)
    gold = tracker.summary(1.0)["gold"]
    assert (gold["promised"], gold["kept"], gold["best_effort"]) == (3, 1, 1)
    assert gold["window"]["kept_share"] == 1 / 3
    recent = tracker._recent.counts
    assert [recent["gold", name].total() for name in ("ttft_ms", "ttft_error_ms", "tpot_error_ms")] == [3, 1, 1]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, (True, True)),
        ({"was_promised": True, "has_moved": True}, (True, False)),
        ({"was_promised": True, "verdict": Verdict.BEST_EFFORT}, (True, False)),
        ({"finish": "error"}, (True, False)),
        ({"finish": "abort"}, (True, False)),
        ({"verdict": Verdict.BEST_EFFORT}, (False, False)),
        ({"verdict": Verdict.UNCHECKED}, (False, False)),
        ({"predicted_ttft_s": INF}, (False, False)),
    ],
    ids=str,
)
def test_what_was_promised_and_what_tests_a_prediction(changes: dict[str, Any], told: tuple[bool, bool]) -> None:
    changed = msgspec.structs.replace(outcome("stop", True), **changes)
    assert (changed.is_promised, changed.tests_prediction) == told


def test_the_window_forgets_and_the_total_does_not() -> None:
    tracker = Tracker(window_s=10.0)
    tracker.note(outcome("stop", False), 0.0)
    tracker.note(outcome("stop", True), 20.0)
    gold = tracker.summary(21.0)["gold"]
    assert (gold["attainment"], gold["window"]["attainment"]) == (0.5, 1.0)
    assert gold["window"]["ttft_error_ms"]["p50"] == pytest.approx(-100.0, rel=0.01)
    assert tracker.summary(100.0)["gold"]["window"]["attainment"] is None


def test_a_request_of_several_sequences_counts_once() -> None:
    """100 prompts of one request were 100 requests."""
    tracker = Tracker()
    for scope in (*[Scope.SEQUENCE] * 100, Scope.REQUEST):
        tracker.note(msgspec.structs.replace(outcome("stop", True), scope=scope), 0.0)
    assert tracker.total["gold"].requests == 1
