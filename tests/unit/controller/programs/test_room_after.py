"""When a program comes back that was one too many."""

import pytest

from controller.programs.bound import ProgramBound
from controller.programs.open_program import Left, OpenProgram
from tests.support.fleet_cases import fleet
from tests.unit.controller.programs.test_bound import call, one


@pytest.mark.parametrize("work_s", [3.0, 30.0])
def test_who_returns_when_told_fits_if_the_work_was_served_at_the_pace_assumed(work_s: float) -> None:
    """However little work it has itself: what is over is due to all of them together."""
    state = fleet()
    one(state, call("first"), 0.0)
    bound, left = ProgramBound(state.slots), Left(work_s, 1.0, 10.0, all_idle_s=1.0, all_gaps_s=10.0)
    others = [OpenProgram(0.0, 100.0, "a", is_promised=True, left=left._replace(work_s=16.0)) for _ in range(4)]
    for program in others:
        bound.note(program)
    newcomer = OpenProgram(0.0, 100.0, "a", left=left)
    assert bound.is_too_much(newcomer, 0.0)
    rate, back_s = (64.0 + work_s) / (100.0 * newcomer.load), newcomer.room_after_s
    for program in others:
        program.left = program.left._replace(work_s=16.0 - rate * back_s / len(others))
        bound.note(program)
    assert bound.load(OpenProgram(back_s, 100.0, "a", left=left), back_s) == pytest.approx(1.0)
