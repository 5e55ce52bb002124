"""Deadlines of stages."""

import math

import numpy as np
import pytest

from planning.programs.deadlines import (
    FOLLOWS_PACE,
    LEAST_S,
    Outlook,
    StageClock,
    can_end_in_time,
    is_beyond_all_known,
    latest_end_s,
    outlook,
    stage_deadline_s,
)

ONE = np.array([[1.0, 3.0, 6.0]])  # execution of one graph of three stages
GAPS = np.array([[0.0, 2.0, 2.0]])


def seen(stage: int, execution: np.ndarray = ONE, gaps: np.ndarray = GAPS, similarity: float = 1e9) -> Outlook:
    return outlook(np.full(len(execution), similarity), execution, gaps, stage)


def due_s(seen: Outlook, clock: StageClock, slowest_s: float = 0.0) -> float:
    return stage_deadline_s(seen.within(clock), clock, slowest_s)


def latest_s(seen: Outlook, clock: StageClock) -> float:
    return latest_end_s(seen.within(clock), clock)


def test_stages_are_due_by_their_accumulated_share_beside_tool_time() -> None:
    """D = 24 with 4 of tools: execution may take 20, of which the graph spends 10, 30 and 60 %."""
    assert due_s(seen(0), StageClock(24.0, 0.0, 0.0)) == pytest.approx(2.0)
    assert due_s(seen(1), StageClock(24.0, 3.0, 2.0)) == pytest.approx(10.0)
    assert due_s(seen(2), StageClock(24.0, 11.0, 4.0)) == pytest.approx(24.0)


def test_what_earlier_stages_saved_is_the_next_ones() -> None:
    assert due_s(seen(1), StageClock(24.0, 2.5, 2.0)) == due_s(seen(1), StageClock(24.0, 3, 2.0))


def test_a_late_program_shares_out_what_is_left() -> None:
    """At 12 of 24, 2 of tools to come: 10 left for 3 and 6."""
    assert due_s(seen(1), StageClock(24.0, 12.0, 2.0)) == pytest.approx(12.0 + 10.0 / 3.0)


def test_siblings_of_a_slow_sub_request_yield_until_it_ends_but_not_beyond_the_deadline() -> None:
    clock = StageClock(24.0, 3.0, 2.0)
    assert due_s(seen(1), clock, slowest_s=15.0) == 15.0
    assert due_s(seen(1), clock, slowest_s=99.0) == 24.0


def test_after_the_deadline_and_without_one() -> None:
    assert due_s(seen(1), StageClock(24.0, 30.0, 2.0)) == 30.0 + LEAST_S
    assert due_s(seen(1), StageClock(math.inf, 3.0, 2.0)) == math.inf


def test_the_latest_end_leaves_what_follows_a_busy_engines_pace() -> None:
    """D = 24; 9 of execution and 4 of tools follow the first stage, and nothing the last."""
    assert latest_s(seen(0), StageClock(24.0, 0.0, 0.0)) == pytest.approx(24.0 - 9.0 * FOLLOWS_PACE - 4.0)
    assert latest_s(seen(2), StageClock(24.0, 11.0, 4.0)) == pytest.approx(24.0)
    assert latest_s(seen(0), StageClock(24.0, 9.0, 0.0)) == 9.0 + LEAST_S


def test_an_unknown_program_starts_from_the_prior() -> None:
    nothing = np.zeros((0, 5))
    unknown = outlook(np.zeros(0), nothing, nothing, 0)
    assert due_s(unknown, StageClock(20.0, 0.0, 0.0)) == pytest.approx(5.0)


def test_a_kind_of_program_can_end_in_time_unless_nearly_all_known_ones_could_not() -> None:
    known_s = np.array([5.0] + 39 * [14.0])
    assert can_end_in_time(known_s, 14.0)
    assert not can_end_in_time(known_s, 13.9)
    assert can_end_in_time(np.array([5.0, 5.0, *known_s]), 13.9), "one in twenty could"


def test_few_known_programs_refuse_nobody() -> None:
    assert can_end_in_time(np.array(18 * [14.0]), 5.0)
    assert not can_end_in_time(np.array(19 * [14.0]), 5.0)
    assert can_end_in_time(np.zeros(0), 5.0)
    assert not can_end_in_time(np.zeros(0), 0.0)


def test_one_long_program_in_three_does_not_decide_for_the_others() -> None:
    execution, gaps = np.array([[1.0, 3.0, 6.0], [1.0, 3.0, 6.0], [1.0, 500.0, 900.0]]), np.repeat(GAPS, 3, axis=0)
    mixed = seen(0, execution, gaps)
    assert due_s(mixed, StageClock(24.0, 0.0, 0.0)) == pytest.approx(2.0)


def test_time_that_a_program_has_lost_takes_its_chance_and_says_nothing_of_its_size() -> None:
    """Of 9 s and 2 s of execution left, with 2 of tools; both graphs fit a deadline of 24, and the short one of 10."""
    both = seen(1, np.array([[1.0, 3.0, 6.0], [1.0, 1.0, 1.0]]), np.repeat(GAPS, 2, axis=0))
    last_s = [24.0 - FOLLOWS_PACE * left_s - 2.0 for left_s in (9.0, 2.0)]
    chances = [both.chance_in_time(StageClock(24.0, now_s, 2.0)) for now_s in (last_s[0], last_s[0] + 0.1, last_s[1])]
    assert chances == pytest.approx([1.0, 0.5, 0.5])
    assert both.chance_in_time(StageClock(24.0, last_s[1] + 0.1, 2.0)) == pytest.approx(0.0, abs=1e-6)
    assert both.chance_in_time(StageClock(10.0, 3.0, 2.0)) == pytest.approx(1.0), "a client knows how large its task is"
    assert both.chance_in_time(StageClock(1.0, 0.5, 0.9999)) == 0.0, "no graph is so short"


def test_without_history_nothing_is_beyond_it() -> None:
    known_s = np.array([14.0, 20.0])
    assert [is_beyond_all_known(known_s, left_s) for left_s in (13.9, 14.0)] == [True, False]
    assert not is_beyond_all_known(np.zeros(0), 1.0)
