"""A deadline, or a tighter one, that a program's client says with a later call."""

import pytest

from controller.fleet import Fleet
from protocol.messages import Decision, Verdict
from protocol.programs import INF, Program, StageGiven
from tests.support.fleet_cases import LOOSE, fleet
from tests.unit.controller.programs.test_programs import agent, end, one, sub


def begun(deadline_s: float = INF) -> Fleet:
    """A program without a deadline, or with this one, whose first call was admitted at 100 s and took a second."""
    state = fleet()
    first = one(state, sub("p-0", Program("p", deadline_s, app="agent"), slo=LOOSE), 100.0)
    end(state, "p-0", 101.0)
    assert first.verdict == Verdict.ADMITTED
    assert stage_of(first).is_promised, "its own objective"
    return state


def stage_of(decision: Decision) -> StageGiven:
    assert decision.stage
    return decision.stage


@pytest.mark.parametrize("first_s", [INF, 30.0])
@pytest.mark.parametrize(("deadline_s", "is_promised"), [(20.0, True), (4.0, False)])
def test_it_is_promised_only_if_it_can_be_kept(first_s: float, deadline_s: float, is_promised: bool) -> None:
    """It was taken for promised unseen: the second one is over in a tenth of a second."""
    state = begun(first_s)
    second = one(state, sub("p-1", agent(deadline_s=deadline_s), 20_000), 103.9)
    assert stage_of(second).is_promised == is_promised
    program = state.programs.open["", "p"]
    assert (program.is_promised, program.row >= 0) == (is_promised, is_promised)
    end(state, "p-1", 105.0)
    state.programs._close(("", "p"), 200.0)
    counts = state.programs.counts
    assert (counts.promised, counts.kept) == (is_promised, is_promised)
    assert state.programs.bound.scales.get("", 1.0) == 1.0, "no promise was broken"


def test_a_promise_that_its_ingress_remembers_holds() -> None:
    """After a new controller has begun, which heard first of a call that does not repeat the deadline."""
    state = begun()
    second = one(state, sub("p-1", agent(is_promised=True, age_s=3.9), 20_000), 103.9)
    assert stage_of(second).is_promised


def test_a_promise_that_one_ingress_remembers_holds_though_another_spoke_first() -> None:
    """After a new controller has begun, which heard first of a call by way of an ingress that knew of no promise."""
    state = fleet()
    unknowing = one(state, sub("p-1", agent(deadline_s=0.3), 20_000), 103.0)
    looser = one(state, sub("p-2", agent(deadline_s=20.0, is_promised=True), 500), 103.05)
    assert not stage_of(unknowing).is_promised
    assert not stage_of(looser).is_promised, "that was for 20 s"
    second = one(state, sub("p-3", agent(deadline_s=0.3, is_promised=True, age_s=0.1), 500), 103.1)
    assert stage_of(second).is_promised
    assert state.programs.open["", "p"].is_promised
