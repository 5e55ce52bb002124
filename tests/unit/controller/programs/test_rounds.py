"""A call whose answer is made in rounds, each a request of its own, as in a beam search: it is one call."""

import msgspec
import pytest

from controller.fleet import Fleet
from controller.programs.under_way import ROUNDS_S
from protocol.messages import Decision, Outcome, Scope, Verdict
from tests.support.fleet_cases import fleet, report
from tests.unit.controller.programs.test_programs import agent, one, sub

BEAMS = 2


def ask(state: Fleet, position: int, beam: int, now_s: float, is_last: bool = False) -> Decision:
    """A round; the call arrived at 0 s."""
    told = agent(call="c-0-0", position=position, is_last=is_last)
    request = sub(f"c-{position}-{beam}", told, 500 + position)
    return one(state, msgspec.structs.replace(request, age_s=now_s), now_s)


def tell(state: Fleet, name: str, now_s: float, finish: str = "length", scope: Scope = Scope.SEQUENCE) -> None:
    told = (True, 0.1, 0.01, 1.0, 0.1, 0.01, 1 if finish == "length" else 0, Verdict.ADMITTED)
    state.on_outcome(Outcome(name, "loose", "loose", finish, *told, scope), now_s)


def play(state: Fleet, rounds: int, is_last: bool = False) -> list[Decision]:
    """A call of so many rounds, a second each."""
    decisions = []
    for position in range(rounds):
        beams = range(BEAMS if position else 1)
        decisions += [ask(state, position, beam, float(position), is_last) for beam in beams]
        for beam in beams:
            tell(state, f"c-{position}-{beam}", position + 0.5 + 0.1 * beam)
    return decisions


def test_all_rounds_are_one_call_with_one_deadline() -> None:
    state = fleet()
    stages = [decision.stage for decision in play(state, 4)]
    assert len(stages) == 1 + 3 * BEAMS
    assert all(stage == stages[0] for stage in stages)
    program = state.programs.open["", "p"]
    assert program.nodes["output_tokens"].tolist() == [4]
    assert program.nodes["end_s"].tolist() == [pytest.approx(3.6)]
    assert not program.is_running
    assert not state.programs._calls


def test_it_runs_while_one_of_a_round_does() -> None:
    state = fleet()
    play(state, 1)
    for beam in range(BEAMS):
        ask(state, 1, beam, 1.0)
    tell(state, "c-1-0", 1.5)
    assert state.programs.open["", "p"].is_running
    tell(state, "c-1-1", 1.6)
    assert not state.programs.open["", "p"].is_running


def test_the_last_call_ends_its_program_with_all_its_rounds() -> None:
    state = fleet()
    play(state, 3, is_last=True)
    assert ("", "p") in state.programs.open
    tell(state, "c-0-0", 3.0, scope=Scope.REQUEST)
    told = state.programs.status(3.0)
    assert (told["open"], told["on_time"], told["kept"]) == (0, 1, 1)
    (history,) = state.programs.histories.values()
    assert history.table.stages[0]["requests"][:2].tolist() == [1, 0]


def test_the_last_call_ends_its_program_though_nobody_says_that_its_rounds_are_over() -> None:
    """Of several controllers another one may be told."""
    state = fleet()
    play(state, 3, is_last=True)
    assert state.programs.status(2.6 + ROUNDS_S - 0.1)["open"] == 1
    told = state.programs.status(2.6 + ROUNDS_S + 0.1)
    assert (told["open"], told["on_time"], told["kept"]) == (0, 1, 1)


def test_the_next_call_is_the_next_stage() -> None:
    state = fleet()
    play(state, 3)
    stage = one(state, sub("next", agent(), 700), 5.0).stage
    assert stage
    assert stage.stage == 2
    assert state.programs.open["", "p"].gaps_s() == pytest.approx(5.0 - 2.6)


def test_a_client_that_leaves_in_a_later_round_has_had_a_part_of_the_answer() -> None:
    state = fleet()
    play(state, 2)
    ask(state, 2, 0, 2.0)
    tell(state, "c-2-0", 2.5, "abort")
    program = state.programs.open["", "p"]
    assert (len(program.nodes), program.has_failed) == (1, True)


def test_a_call_that_is_refused_in_its_first_round_has_begun_nothing() -> None:
    state = fleet()
    state.programs.give_stages([sub("c-0-0", agent(call="c-0-0"))], 0.0)
    state.programs.told([Decision("c-0-0", Verdict.REFUSED, "", "loose", "no_replica")], 0.0)
    assert (len(state.programs.open), state.programs._calls) == (0, {})


def test_rounds_whose_ingress_is_gone_end_once_no_replica_has_them() -> None:
    state = fleet()
    play(state, 1)
    ask(state, 1, 0, 1.0)
    idle_s = state.options.programs.idle_s
    state.report(report("a", 10_000), idle_s)
    for k in range(1, 4):
        state.report(report("a", 10_000 + k), k * idle_s)
        state.programs.status(k * idle_s + 2.0)
    assert (len(state.programs.open), state.programs._calls) == (0, {})
    assert state.programs.counts.failed == 1


def ask_both(state: Fleet, verdict: Verdict) -> None:
    """The second round: one beam has a place, and this is said of the other one."""
    told = agent(call="c-0-0", position=1)
    state.programs.give_stages([sub(f"c-1-{beam}", told, 501) for beam in range(BEAMS)], 1.0)
    placed = Decision("c-1-0", Verdict.ADMITTED, "a", "loose", "attainable")
    state.programs.told([placed, Decision("c-1-1", verdict, "", "loose", "no_replica")], 1.0)


def test_a_round_that_another_controller_is_asked_about_is_not_waited_for() -> None:
    state = fleet()
    play(state, 1)
    ask_both(state, Verdict.ELSEWHERE)
    assert state.programs.open["", "p"].is_running, "the other beam is here"
    tell(state, "c-1-0", 1.5)
    ask(state, 2, 0, 2.0)
    tell(state, "c-2-0", 2.5)
    assert (state.programs.open["", "p"].is_running, state.programs._calls) == (False, {})
    stage = one(state, sub("next", agent(), 700), 5.0).stage
    assert stage
    assert stage.stage == 2


def test_a_call_runs_while_one_of_its_rounds_is_refused_and_another_is_not() -> None:
    state = fleet()
    play(state, 1)
    ask_both(state, Verdict.REFUSED)
    program = state.programs.open["", "p"]
    assert (program.is_running, program.is_refused) == (True, True)
    tell(state, "c-1-0", 1.5)
    assert program.is_running, "the other one asks again"
    tell(state, "c-1-1", 1.6, "error")
    assert (program.is_running, program.is_refused, state.programs._calls) == (False, True, {})
