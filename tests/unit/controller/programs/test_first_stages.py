"""What the first stage of a program is given, and whether the whole program is promised by it."""

import msgspec
import pytest

from controller.fleet import Fleet
from controller.programs.programs import TOO_MANY
from protocol.messages import AdmissionRequest, Decision, Slo, Verdict
from protocol.programs import Program
from tests.support.fleet_cases import fleet, report
from tests.unit.controller.programs.test_programs import OPEN, agent, end, one, sub

CALLS, CALL_S, TOOL_S = 6, 1.9, 1.0


@pytest.mark.parametrize("is_group", [False, True])
def test_several_calls_at_once_are_as_good_a_beginning_as_one(is_group: bool) -> None:
    """Two siblings, or the sequences of one request: such a program was never promised."""
    state = fleet()
    state.report(report("a"), 0.0)
    asks = [sub("p-0", agent()), sub("p-1", agent())]
    if is_group:
        asks = [msgspec.structs.replace(each, group="p-0") for each in asks]
    decisions = state.admit(asks, 0.0)
    assert [(d.verdict, d.stage and d.stage.is_promised) for d in decisions] == [(Verdict.ADMITTED, True)] * 2
    assert len(state.programs.bound.promised) == 1
    for ask in asks:
        end(state, ask.request_id, 1.0)
    later = one(state, sub("p-2", agent()), 3.0)
    assert later.stage
    assert later.stage.is_promised


def test_siblings_of_a_first_call_share_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """With each of them their program was larger: the last one could be too much beside the first ones."""
    state, answers = fleet(), [False, True, True]
    monkeypatch.setattr(state.programs.bound, "is_too_much", lambda *_: answers.pop(0))
    state.report(report("a"), 0.0)
    decisions = state.admit([sub(f"p-{k}", agent()) for k in range(3)], 0.0)
    assert {d.verdict for d in decisions} == {Verdict.ADMITTED}
    assert answers == [True, True]


def test_a_deadline_that_idle_engines_just_keep_is_kept() -> None:
    """What followed was taken to need half as much again, and where that did not fit the first stage had 1 ms."""
    state = fleet()

    def play(name: str, deadline_s: float, start_s: float) -> list[Verdict]:
        now_s, verdicts = start_s, list[Verdict]()
        for k in range(CALLS):
            state.report(report("a", int(now_s * 1000) + 1), now_s)
            program = Program(name, deadline_s, app="agent", is_last=k == CALLS - 1)
            slo = Slo(e2e_s=deadline_s, tier="loose", is_tier_open=True)
            call = AdmissionRequest(f"{name}-{k}", 3000 + 200 * k, 600, slo, program=program)
            (decision,) = state.admit([call], now_s)
            verdicts.append(decision.verdict)
            if decision.verdict == Verdict.REFUSED:
                break
            assert decision.stage
            assert decision.stage.is_promised
            assert decision.stage.e2e_s > CALL_S
            end(state, f"{name}-{k}", now_s + CALL_S, tokens=300)
            now_s += CALL_S + TOOL_S
        return verdicts

    for i in range(10):
        play(f"known {i}", 60.0, 100.0 * i)
    whole_s = CALLS * CALL_S + (CALLS - 1) * TOOL_S
    for i, spare in enumerate((1.02, 1.05, 1.15, 1.4)):
        assert play(f"tight {i}", spare * whole_s, 3000.0 + 100.0 * i) == [Verdict.ADMITTED] * CALLS


def call(state: Fleet, name: str, k: int, deadline_s: float, now_s: float) -> Decision:
    """One of five calls of a program, of 20,000 prompt tokens."""
    program = Program(name, deadline_s, app="agent", is_last=k == 4)
    slo = msgspec.structs.replace(OPEN, e2e_s=deadline_s, tier="tight")
    return one(state, sub(f"{name}-{k}", program, 20_000, slo), now_s)


def knowing(programs: int) -> Fleet:
    """A fleet that knows so many programs that take more than half a minute on idle engines."""
    state = fleet()
    for i in range(programs):
        for k in range(5):
            call(state, f"known {i}", k, 300.0, now_s := 1000.0 * i + 20.0 * k)
            end(state, f"known {i}-{k}", now_s + 10.0, tokens=1000)
    return state


@pytest.mark.parametrize(("known", "is_promised"), [(1, True), (8, False), (18, False)])
def test_a_deadline_that_no_known_program_could_keep_is_not_promised_by_the_prior_alone(
    known: int, is_promised: bool
) -> None:
    """One known program says too little of others."""
    stage = call(knowing(known), "short", 0, 6.0, 20_000.0).stage
    assert stage
    assert stage.is_promised == is_promised


def test_nor_is_it_when_it_asks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was one too many at first, and there is room now."""
    state = knowing(8)
    monkeypatch.setattr(state.programs.bound, "is_too_much", lambda program, _: not program.is_begun)
    told = list[Decision]()
    for k in range(2):
        told.append(call(state, "short", k, 6.0, now_s := 20_000.0 + k))
        end(state, f"short-{k}", now_s + 0.5)
    assert [(d.reason, d.stage and d.stage.is_promised) for d in told] == [(TOO_MANY, False)] * 2
