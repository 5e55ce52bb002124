"""What a call is given of which the client says that nothing follows."""

import msgspec
import pytest

from controller.fleet import Fleet
from controller.programs.options import ProgramOptions
from controller.programs.programs import UNATTAINABLE
from protocol.messages import Decision, Verdict
from protocol.programs import Program
from tests.support.fleet_cases import fleet
from tests.unit.controller.programs.test_first_stages import knowing
from tests.unit.controller.programs.test_programs import DEADLINE_S, OPEN, agent, end, one, play, sub


def second_call(state: Fleet, name: str, start_s: float, is_last: bool) -> Decision:
    """The second call of a program, 3 s after its first."""
    one(state, sub(f"{name}-0", agent(name)), start_s)
    end(state, f"{name}-0", start_s + 1.0)
    return one(state, sub(f"{name}-1", agent(name, is_last=is_last)), start_s + 3.0)


@pytest.mark.parametrize("stages", ["latest", "accumulated"])
@pytest.mark.parametrize("known", [0, 5])
def test_a_last_call_has_all_the_time_that_is_left(known: int, stages: str) -> None:
    """It left time for the four stages that had followed in the programs before."""
    state = fleet(programs=ProgramOptions(stages=stages))
    for k in range(known):
        play(state, f"p{k}", 100.0 * k, rounds=6)
    given = second_call(state, "q", 1000.0, is_last=True).stage
    assert given
    assert (given.e2e_s, given.stages) == (pytest.approx(DEADLINE_S - 3.0), 2.0)
    program = state.programs.open["", "q"]
    assert (program.later.work_s, program.later.idle_s, program.later.gaps_s) == (0.0, 0.0, 0.0)
    assert program.left.work_s > 0.0
    other = second_call(state, "r", 2000.0, is_last=False).stage
    assert other
    if known or stages == "accumulated":
        assert other.e2e_s < 0.5 * (DEADLINE_S - 3.0)
    assert other.stages > 2.0
    assert state.programs.open["", "r"].later.work_s > 0.0


@pytest.mark.parametrize("is_last", [False, True])
def test_a_program_of_one_call_is_not_judged_by_longer_ones(is_last: bool) -> None:
    """No known program could end by its deadline, so it was refused though nothing was to follow."""
    slo = msgspec.structs.replace(OPEN, e2e_s=20.0, tier="tight")
    decision = one(knowing(20), sub("s-0", Program("s", 20.0, app="agent", is_last=is_last), 500, slo), 40_000.0)
    assert decision.stage
    assert (decision.verdict == Verdict.ADMITTED, decision.stage.is_promised) == (is_last, is_last)
    assert (decision.reason == UNATTAINABLE) != is_last
