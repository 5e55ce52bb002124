"""What an ingress remembers of programs."""

from typing import Any

import pytest

from protocol.messages import Decision, Slo, Verdict
from protocol.programs import IDLE_S, Program, StageGiven
from serving.request import program_memory
from serving.request.program_memory import ProgramMemory
from serving.request.state import HttpRequestState

STAGE = StageGiven(1, 5.0, 20.0, 4.0, 0.0, True)


def served(
    program: Program, name: str = "r", verdict: Verdict = Verdict.ADMITTED, finish: str = "stop"
) -> HttpRequestState:
    state = HttpRequestState(Slo(e2e_s=20.0), program=program)
    state.record_decision(name, Decision(name, verdict, "a", "t", "attainable", stage=STAGE), 0.0)
    state.sequence(name).finish = "refused" if verdict == Verdict.REFUSED else finish
    return state


def play(memory: ProgramMemory, told: Program, arrived_s: float, **how: Any) -> Program:
    """A request of half a second, as the controller is told of it."""
    program = memory.recall(told, "", arrived_s)
    memory.note(served(program, **how), arrived_s + 0.5)
    return program


def test_age_and_promise_come_with_later_requests() -> None:
    memory, told = ProgramMemory(), Program("p", 20.0)
    assert play(memory, told, 100.0) == told
    later = memory.recall(told, "", 107.0)
    assert (later.age_s, later.is_promised) == (7.0, True)
    other = memory.recall(told, "another tenant", 107.0)
    assert (other.age_s, other.is_promised) == (0.0, False)


def test_a_promise_comes_with_requests_that_arrive_while_the_promised_one_runs() -> None:
    """A controller that has begun anew meanwhile knows of it by them alone."""
    memory, told = ProgramMemory(), Program("p", 20.0)
    first = HttpRequestState(Slo(e2e_s=20.0), program=memory.recall(told, "", 100.0))
    memory.follow(first)
    assert not memory.recall(told, "", 101.0).is_promised, "nothing is decided yet"
    first.record_decision("r", Decision("r", Verdict.ADMITTED, "a", "t", "attainable", stage=STAGE), 101.5)
    assert memory.recall(told, "", 102.0).is_promised
    assert not memory.recall(Program("p", 15.0), "", 103.0).is_promised, "that was for 20 s"
    memory.note(first, 104.0)
    assert not memory.recall(told, "", 105.0).is_promised


def test_a_deadline_comes_with_later_requests_that_do_not_repeat_it() -> None:
    """It was lost with the controller: the program went on without one, though promised."""
    memory = ProgramMemory()
    play(memory, Program("p", 20.0), 100.0)
    later = play(memory, Program("p"), 107.0)
    assert (later.deadline_s, later.age_s, later.is_promised) == (20.0, 7.0, True)
    play(memory, Program("p", 15.0), 108.0)
    assert play(memory, Program("p", 20.0), 109.0).deadline_s == 15.0, "the tightest"


def test_what_was_promised_for_a_looser_deadline_is_no_promise_of_a_tighter_one() -> None:
    memory = ProgramMemory()
    running = memory.recall(Program("p", 20.0), "", 100.0)
    play(memory, Program("p", 20.0), 101.0)
    tighter = memory.recall(Program("p", 15.0), "", 102.0)
    assert not tighter.is_promised
    memory.note(served(running), 103.0)
    assert not memory.recall(Program("p"), "", 104.0).is_promised, "what ended was promised for 20 s"
    memory.note(served(tighter), 105.0)
    assert memory.recall(Program("p"), "", 106.0).is_promised


def test_what_was_promised_without_a_deadline_is_no_promise_of_a_later_one() -> None:
    memory = ProgramMemory()
    play(memory, Program("p"), 100.0)
    assert memory.recall(Program("p"), "", 101.0).is_promised
    assert not memory.recall(Program("p", 20.0), "", 102.0).is_promised


def test_a_program_whose_first_request_is_refused_begins_anew() -> None:
    memory, told = ProgramMemory(), Program("p", 20.0)
    play(memory, told, 100.0, verdict=Verdict.REFUSED)
    assert play(memory, told, 130.0).age_s == 0.0
    play(memory, told, 131.0, verdict=Verdict.REFUSED)
    assert memory.recall(told, "", 132.0).age_s == 2.0, "a later refusal does not end it"


def test_a_program_whose_first_request_is_refused_goes_on_while_another_runs() -> None:
    memory, told = ProgramMemory(), Program("p", 20.0)
    running = memory.recall(told, "", 100.0)
    play(memory, told, 101.0, verdict=Verdict.REFUSED)
    memory.note(served(running), 102.0)
    assert memory.recall(told, "", 103.0).age_s == 3.0


def test_a_program_of_which_nothing_was_heard_for_long_begins_anew() -> None:
    memory, told = ProgramMemory(), Program("p", 20.0)
    play(memory, told, 100.0)
    assert play(memory, told, 100.4 + IDLE_S).age_s == 0.4 + IDLE_S, "since the end of its last request"
    again = memory.recall(told, "", 101.0 + 2 * IDLE_S)
    assert (again.age_s, again.is_promised) == (0.0, False)
    assert memory.recall(told, "", 101.0 + 4 * IDLE_S).age_s == 2 * IDLE_S, "one of its requests runs"


@pytest.mark.parametrize(("finish", "age_s"), [("stop", 0.0), ("abort", 3.0), ("error", 3.0)])
def test_a_program_ends_with_its_last_request_if_that_ends_well(finish: str, age_s: float) -> None:
    memory, told = ProgramMemory(), Program("p", 20.0)
    play(memory, told, 100.0)
    play(memory, Program("p", 20.0, is_last=True), 101.0, finish=finish)
    again = memory.recall(told, "", 103.0)
    assert (again.age_s, again.is_promised) == (age_s, age_s > 0.0)


def test_a_last_request_ends_no_program_while_another_runs() -> None:
    memory, told = ProgramMemory(), Program("p", 20.0)
    sibling = memory.recall(told, "", 100.0)
    play(memory, Program("p", 20.0, is_last=True), 101.0)
    assert memory.recall(told, "", 102.0).age_s == 2.0
    for ended_s in (103.0, 104.0):
        memory.note(served(sibling), ended_s)
    assert memory.recall(told, "", 105.0).age_s == 0.0


def test_a_last_request_that_is_refused_ends_nothing() -> None:
    memory, told = ProgramMemory(), Program("p", 20.0)
    sibling = memory.recall(told, "", 100.0)
    play(memory, Program("p", 20.0, is_last=True), 101.0, verdict=Verdict.REFUSED)
    memory.note(served(sibling), 102.0)
    assert memory.recall(told, "", 103.0).age_s == 3.0


def test_a_request_about_which_nothing_was_decided_begins_no_program() -> None:
    memory, told = ProgramMemory(), Program("p", 20.0)
    memory.note(HttpRequestState(Slo(), program=memory.recall(told, "", 100.0)), 101.0)
    assert play(memory, told, 102.0).age_s == 0.0
    memory.note(HttpRequestState(Slo(), program=memory.recall(told, "", 103.0)), 104.0)
    assert memory.recall(told, "", 105.0).age_s == 3.0, "a later one does not end it"


def test_a_response_continues_the_program_of_the_one_before() -> None:
    memory = ProgramMemory()
    assert memory.continued({}, "") is None
    second = memory.continued({"previous_response_id": "resp_1"}, "")
    assert second == Program("resp_1", parents=("resp_1",), is_session=True)
    play(memory, second, 1.0, name="resp_2_0-abcd1234")
    third = memory.continued({"previous_response_id": "resp_2"}, "")
    assert third
    assert (third.id, third.parents) == ("resp_1", ("resp_2",))
    assert memory.continued({"previous_response_id": 5}, "") is None


def test_there_are_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_memory, "MOST_PROGRAMS", 3)
    memory = ProgramMemory()
    for k in range(10):
        memory.recall(Program(f"p{k}"), "", float(k))
    assert len(memory._programs) == 3
    assert memory.recall(Program("p9"), "", 19.0) == Program("p9", age_s=10.0)
