"""What an ingress remembers of programs."""

import pytest

from protocol.messages import Decision, Slo, Verdict
from protocol.programs import Program, StageGiven
from serving.request import program_memory
from serving.request.program_memory import ProgramMemory
from serving.request.state import HttpRequestState

STAGE = StageGiven(1, 5.0, 20.0, 4.0, 0.0, True)


def served(program: Program | None, name: str = "r", verdict: Verdict = Verdict.ADMITTED) -> HttpRequestState:
    state = HttpRequestState(Slo(e2e_s=20.0), program=program)
    state.record_decision(name, Decision(name, verdict, "a", "t", "attainable", stage=STAGE), 0.0)
    return state


def test_age_and_promise_come_with_later_requests() -> None:
    memory, told = ProgramMemory(), Program("p", 20.0)
    first = memory.recall(told, {}, "", 100.0)
    assert first == told
    memory.note(served(first))
    later = memory.recall(told, {}, "", 107.0)
    assert later
    assert (later.age_s, later.is_promised) == (7.0, True)
    other = memory.recall(told, {}, "another tenant", 107.0)
    assert other
    assert (other.age_s, other.is_promised) == (0.0, False)


def test_a_program_whose_first_request_is_refused_begins_anew() -> None:
    memory, told = ProgramMemory(), Program("p", 20.0)
    memory.note(served(memory.recall(told, {}, "", 100.0), verdict=Verdict.REFUSED))
    again = memory.recall(told, {}, "", 130.0)
    assert again
    assert again.age_s == 0.0
    memory.note(served(again))
    memory.note(served(memory.recall(told, {}, "", 131.0), verdict=Verdict.REFUSED))
    later = memory.recall(told, {}, "", 132.0)
    assert later
    assert later.age_s == 2.0, "a later refusal does not end it"


def test_a_response_continues_the_program_of_the_one_before() -> None:
    memory = ProgramMemory()
    assert memory.recall(None, {}, "", 0.0) is None
    second = memory.recall(None, {"previous_response_id": "resp_1"}, "", 1.0)
    assert second == Program("resp_1", parents=("resp_1",), is_session=True)
    memory.note(served(second, "resp_2_0-abcd1234"))
    third = memory.recall(None, {"previous_response_id": "resp_2"}, "", 2.0)
    assert third
    assert (third.id, third.parents) == ("resp_1", ("resp_2",))
    assert memory.recall(None, {"previous_response_id": 5}, "", 2.0) is None


def test_there_are_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_memory, "MOST_PROGRAMS", 3)
    memory = ProgramMemory()
    for k in range(10):
        memory.recall(Program(f"p{k}"), {}, "", float(k))
    assert len(memory._programs) == 3
    assert memory.recall(Program("p9"), {}, "", 19.0) == Program("p9", age_s=10.0)
