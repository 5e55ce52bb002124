"""When steps start and how long they took."""

import numpy as np
import pytest

from replicas.step_clock import StepClock

MIX = np.ones(5)


def test_a_step_is_charged_from_the_end_of_the_one_before_it() -> None:
    clock = StepClock()
    assert clock.next_start_s(10.0) == 10.0
    clock.begin(10.0, MIX, 0.5)
    assert clock.finish(10.4, is_continuing=True)[1] == pytest.approx(0.4)
    clock.begin(10.5, MIX, 0.5)  # 0.1 s of the engine's own work in between
    assert clock.finish(11.0, is_continuing=False)[1] == pytest.approx(0.6)
    clock.begin(20.0, MIX, 0.5)  # after a pause
    assert clock.finish(20.3, is_continuing=True)[1] == pytest.approx(0.3)


def test_under_run_ahead_the_next_step_starts_when_those_in_flight_have_ended() -> None:
    clock = StepClock()
    clock.begin(10.0, MIX, 0.5)
    assert clock.next_start_s(10.1) == pytest.approx(10.5)
    clock.begin(10.1, MIX, 0.2)
    assert clock.next_start_s(10.1) == pytest.approx(10.7)
    assert clock.finish(10.6, is_continuing=True)[1] == pytest.approx(0.6)
    assert clock.next_start_s(10.6) == pytest.approx(10.8)
    assert clock.finish(10.9, is_continuing=False)[1] == pytest.approx(0.3)
    assert clock.next_start_s(11.0) == 11.0


def test_an_overdue_step_ends_now_at_the_earliest() -> None:
    clock = StepClock()
    clock.begin(10.0, MIX, 0.5)
    assert clock.next_start_s(12.0) == 12.0


def test_in_a_pipeline_a_step_is_charged_with_its_way_through_all_stages() -> None:
    """Two stages of 0.25 s each: four steps share them, and end every quarter of a second."""
    clock = StepClock(stages=2)
    clock.begin(10.0, MIX, 0.5)
    assert clock.next_start_s(10.0) == 10.0, "the second stage takes the first step, and nothing else is known"
    clock.begin(10.25, MIX, 0.5)
    assert clock.next_start_s(10.25) == pytest.approx(10.5)
    clock.begin(10.3, MIX, 0.5)  # vLLM forms one more than there are stages
    assert clock.next_start_s(10.3) == pytest.approx(10.75)
    assert clock.finish(10.5, is_continuing=True)[1] == pytest.approx(0.5)
    clock.begin(10.55, MIX, 0.5)
    assert [clock.finish(at_s, is_continuing=True)[1] for at_s in (10.75, 11.0, 11.25)] == pytest.approx([0.5] * 3)


def test_an_empty_step_in_flight_computes_nothing() -> None:
    clock = StepClock()
    assert (clock.is_running, clock.is_computing) == (False, False)
    clock.begin(10.0, MIX, 0.5)
    clock.begin(10.0, np.zeros(5), 0.0)
    assert (clock.is_running, clock.is_computing) == (True, True)
    clock.finish(10.5, is_continuing=True)
    assert (clock.is_running, clock.is_computing) == (True, False)
