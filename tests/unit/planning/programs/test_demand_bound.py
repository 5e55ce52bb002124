"""The demand bound of programs beside a brute force and a fluid schedule."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planning.programs.demand_bound import (
    LEAST_SHARE,
    PRIOR_STRETCH,
    demand,
    evicted_share,
    overrun_s,
    reachable_work_s,
    stretch,
    usable_share,
)

SECONDS = st.floats(0.1, 50.0)
PROGRAMS = st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=7)
RATE = st.floats(0.5, 4.0)


def fits(due_s: np.ndarray, work_s: np.ndarray, now_s: float, rate: float) -> bool:
    """Whether earliest deadline first keeps all deadlines that are not over."""
    return demand(due_s, work_s, now_s, rate) <= 1.0


def lateness_of_fluid_edf_s(due_s: np.ndarray, work_s: np.ndarray, rate: float) -> float:
    """How late the latest program ends if all capacity goes to the earliest deadline that has work left."""
    now_s, latest_s, left_s = 0.0, -np.inf, work_s.copy()
    while (left_s > 0.0).any():
        first = int(np.argmin(np.where(left_s > 0.0, due_s, np.inf)))
        now_s += left_s[first] / rate
        left_s[first] = 0.0
        latest_s = max(latest_s, now_s - due_s[first])
    return latest_s


@pytest.mark.parametrize("seed", range(20))
def test_demand_is_that_of_the_worst_deadline(seed: int) -> None:
    rng = np.random.default_rng(seed)
    due_s, work_s, rate = rng.uniform(-2.0, 30.0, 9), rng.uniform(0.0, 9.0, 9), float(rng.uniform(0.5, 4.0))
    worst = 0.0
    for end_s in due_s[due_s > 5.0]:
        until = (due_s <= end_s) & (due_s > 5.0)
        worst = max(worst, float(work_s[until].sum()) / (rate * (end_s - 5.0)))
    assert demand(due_s, work_s, 5.0, rate) == pytest.approx(worst)


@given(PROGRAMS, RATE, st.tuples(SECONDS, SECONDS))
def test_a_newcomer_fits_exactly_where_it_makes_nobody_late_who_was_in_time(
    programs: list[tuple[float, float]], rate: float, newcomer: tuple[float, float]
) -> None:
    """Programs that are late without it are none of its business."""
    due_s, work_s = (np.array(column) for column in zip(*programs, newcomer, strict=True))
    order = np.argsort(due_s, kind="stable")
    ends_s = np.cumsum(work_s[order]) / rate
    later = due_s[order] >= due_s[-1]
    if (np.abs(ends_s - due_s[order]) > 1e-6).all():
        assert (demand(due_s, work_s, 0.0, rate, due_s[-1]) <= 1.0) == (ends_s[later] <= due_s[order][later]).all()
    late_s = (ends_s - due_s[order])[later].max()
    assert overrun_s(due_s, work_s, rate, due_s[-1]) == pytest.approx(min(max(0.0, late_s), due_s.max()), abs=1e-6)


@pytest.mark.parametrize("seed", range(20))
def test_programs_fit_where_some_order_of_service_keeps_all(seed: int) -> None:
    """The exact schedule of one replica, by every order of service."""
    rng = np.random.default_rng(seed)
    due_s, work_s = rng.uniform(1.0, 12.0, 5), rng.uniform(0.1, 4.0, 5)
    can = any((np.cumsum(work_s[list(o)]) <= due_s[list(o)]).all() for o in itertools.permutations(range(5)))
    assert fits(due_s, work_s, 0.0, 1.0) == can


@given(PROGRAMS, RATE)
def test_a_set_fits_exactly_where_a_fluid_schedule_keeps_all(programs: list[tuple[float, float]], rate: float) -> None:
    due_s, work_s = np.array(programs).T
    late_s = lateness_of_fluid_edf_s(due_s, work_s, rate)
    if abs(late_s) > 1e-6:
        assert fits(due_s, work_s, 0.0, rate) == (late_s < 0.0)


@given(PROGRAMS, RATE, st.data())
def test_less_work_or_a_later_deadline_never_makes_it_unfit(
    programs: list[tuple[float, float]], rate: float, data: st.DataObject
) -> None:
    due_s, work_s = np.array(programs).T
    which, part = data.draw(st.integers(0, len(programs) - 1)), data.draw(st.floats(0.0, 1.0))
    less_s, later_s = work_s.copy(), due_s.copy()
    less_s[which] *= part
    later_s[which] += 10.0 * part
    most = demand(due_s, work_s, 0.0, rate) * (1.0 + 1e-9)
    assert demand(due_s, less_s, 0.0, rate) <= most
    assert demand(later_s, work_s, 0.0, rate) <= most
    assert demand(np.delete(due_s, which), np.delete(work_s, which), 0.0, rate) <= most


def test_nothing_open_and_no_replica() -> None:
    assert demand(np.zeros(0), np.zeros(0), 0.0, 2.0) == 0.0
    assert demand(np.array([9.0]), np.array([1.0]), 0.0, 0.0) == np.inf


def test_a_program_that_cannot_end_asks_for_what_can_be_done() -> None:
    asked_s = reachable_work_s(np.array([8.0, 8.0, 8.0]), np.array([10.0, 40.0, 0.0]), np.array([20.0, 10.0, 5.0]))
    assert asked_s.tolist() == [8.0, 2.0, 5.0], "all of it, a quarter, and what one replica does until the deadline"


def test_conversations_beyond_the_cache_are_evicted() -> None:
    assert evicted_share(0.0, 100.0) == evicted_share(100.0, 100.0) == 0.0
    assert evicted_share(200.0, 100.0) == 0.5


def test_calls_may_take_as_long_as_deadlines_leave_beside_tools() -> None:
    left_s, idle_s, gaps_s = np.array([90.0, 110.0]), np.array([10.0, 10.0]), np.array([20.0, 20.0])
    alone = stretch(left_s, idle_s, gaps_s)
    many = stretch(np.tile(left_s, 100), np.tile(idle_s, 100), np.tile(gaps_s, 100))
    assert PRIOR_STRETCH < alone < many < 8.0, "160 s for 20 s, drawn to the prior"
    assert many == pytest.approx(8.0, rel=0.05)
    assert stretch(left_s, np.zeros(2), gaps_s) == PRIOR_STRETCH


def test_tight_deadlines_leave_less_capacity_to_promise() -> None:
    shares = [usable_share(stretched, 9.0) for stretched in (-1.0, 1.0, 2.5, 4.0, 8.0)]
    assert shares[:2] == [LEAST_SHARE] * 2
    assert shares[2:] == pytest.approx([0.2, 0.5, 0.75])
    assert usable_share(2.5, 2.0) == 1.0, "two programs that may both take as long as if they always ran together"


def test_one_program_with_all_the_time_there_is_says_little() -> None:
    idle_s, gaps_s = np.full(21, 10.0), np.zeros(21)
    many = stretch(np.full(20, 30.0), idle_s[:20], gaps_s[:20])
    a_day = stretch(np.append(np.full(20, 30.0), 86_400.0), idle_s, gaps_s)
    assert many == pytest.approx(3.0)
    assert many < a_day < 1.5 * many


@given(PROGRAMS, RATE)
def test_the_overrun_is_how_late_the_latest_program_ends(programs: list[tuple[float, float]], rate: float) -> None:
    left_s, work_s = (np.array(column) for column in zip(*programs, strict=True))
    late_s = lateness_of_fluid_edf_s(left_s, work_s, rate)
    assert overrun_s(left_s, work_s, rate) == pytest.approx(min(max(0.0, late_s), left_s.max()), abs=1e-6)
