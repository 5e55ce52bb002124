"""Calls of programs that nobody served: refused, or given up while they waited. They are no stages."""

import msgspec
import pytest

from controller.decisions import NO_PLACE
from controller.fleet import Fleet
from controller.programs.open_program import called
from controller.programs.options import ProgramOptions
from protocol.messages import Decision, Verdict
from tests.support.fleet_cases import fleet
from tests.unit.controller.programs.test_programs import OPEN, agent, end, fill, one, sub
from tests.unit.controller.programs.test_waits import ask, full, known_scale

__all__ = ["full"]  # a fixture

HASTY = msgspec.structs.replace(OPEN, ttft_s=0.05)
ADMITTED, REFUSED = Verdict.ADMITTED, Verdict.REFUSED


def begun() -> Fleet:
    """A fleet without room for what is hasty, and a program whose first call has ended at 1 s."""
    state = fleet(programs=ProgramOptions(keeps_promises=False))
    one(state, sub("p-0", agent()), 0.0)
    end(state, "p-0", 1.0)
    fill(state, 2.0)
    return state


def refused(state: Fleet, name: str, now_s: float, is_last: bool = False) -> Decision:
    decision = one(state, sub(name, agent(is_last=is_last), 4000, HASTY), now_s, is_full=True)
    assert decision.verdict == REFUSED
    end(state, name, now_s, "refused", 0)
    return decision


def test_a_call_that_is_refused_and_asked_again_is_one_stage() -> None:
    state = begun()
    told = [refused(state, f"p-{k}", 2.0 + k).stage for k in range(1, 4)]
    assert [given.stage for given in told if given] == [2, 2, 2]
    served = one(state, sub("p-4", agent(is_last=True), 4000), 10.0)
    assert served.stage
    assert (served.verdict, served.stage.stage) == (ADMITTED, 2)
    end(state, "p-4", 11.0)
    (history,) = state.programs.histories.values()
    stages = history.table.stages[0]
    assert stages["requests"][:3].tolist() == [1, 1, 0]
    assert stages["gap_s"][1] == pytest.approx(2.0), "from then on it waited for us"
    assert list(history.gaps_s) == [pytest.approx(2.0)]
    assert stages["fresh_tokens"][1] == 4000 - 600, "it continues the first call, not a refused one"


def test_a_program_whose_last_call_was_refused_has_failed_and_teaches_nothing() -> None:
    state = begun()
    refused(state, "p-1", 2.5, is_last=True)
    assert ("", "p") in state.programs.open, "it may ask again"
    idle_s = state.options.programs.idle_s
    told = state.programs.status(3.0 + idle_s)
    assert (told["open"], told["failed"], told["on_time"], told["known_graphs"]) == (0, 1, 0, 0)


def test_the_program_goes_on_where_its_last_call_is_refused_and_a_sibling_ends() -> None:
    state = begun()
    assert one(state, sub("p-1", agent(), 500), 5.0).verdict == ADMITTED
    fill(state, 5.0)
    refused(state, "p-2", 5.5, is_last=True)
    end(state, "p-1", 6.0)
    program = state.programs.open["", "p"]
    assert (len(program.nodes), program.is_last, program.has_failed) == (2, False, False)


def test_a_stream_that_is_refused_on_its_way_to_another_replica_stays_the_same_part() -> None:
    state = begun()
    request = sub("p-1", agent(), 500)
    assert one(state, request, 5.0).verdict == ADMITTED
    moved = msgspec.structs.replace(request, request_id="p-1~1", emitted_tokens=5, age_s=1.0)
    state.programs.give_stages([moved], 6.0)
    state.programs.told([Decision("p-1~1", REFUSED, "", "loose", "no_replica")], 6.0)
    program = state.programs.open["", "p"]
    assert (len(program.nodes), program.is_running) == (2, False)
    state.programs.give_stages([moved], 6.5)
    assert (len(program.nodes), program.is_running) == (2, True)


@pytest.mark.parametrize(("finish", "counted"), [("refused", "refused"), ("abort", "failed")])
def test_whoever_gives_up_waiting_has_begun_no_program(full: Fleet, finish: str, counted: str) -> None:
    """Its ``max_wait_ms`` has passed, or its client left."""
    known_scale(full, 8.0)
    assert ask(full, "second", 1.0).reason == NO_PLACE
    assert len(full.programs.bound.promised) == 2
    end(full, "second-0", 2.0, finish, 0)
    assert [program.parts.keys() for program in full.programs.bound.promised] == [{"first-0"}]
    told = full.programs.status(2.0)
    assert (told["open"], told["waiting"], told[counted]) == (1, 0, 1)
    full.check_integrity()


def test_a_call_that_waits_stays_while_a_sibling_gives_up(full: Fleet) -> None:
    known_scale(full, 8.0)
    assert ask(full, "second", 1.0).reason == NO_PLACE
    assert ask(full, "second", 1.0, 1).reason == NO_PLACE
    end(full, "second-0", 1.5, "abort", 0)
    second = full.programs.open["", "second"]
    assert second in full.programs.bound.promised
    assert list(second.parts) == ["second-1"]


def test_a_call_that_waits_and_whose_ingress_dies_counts_until_that_is_noticed(full: Fleet) -> None:
    known_scale(full, 8.0)
    ask(full, "second", 1.0)
    second = full.programs.open["", "second"]
    idle_s = full.options.programs.idle_s
    full.programs.status(2.0 + idle_s)
    assert second not in full.programs.bound.promised
    assert ("", "second") not in full.programs.open


def test_what_was_served_without_the_controller_is_a_stage() -> None:
    state = begun()
    state.programs.give_stages([sub("p-1", agent(), 4000)], 3.0)
    end(state, "p-1", 4.0)
    assert len(state.programs.open["", "p"].nodes) == 2


@pytest.mark.parametrize("finish", ["abort", "error"])
def test_a_call_that_ends_before_its_first_token_is_no_stage(finish: str) -> None:
    """Its client had no patience, and asks again."""
    state = fleet()
    one(state, sub("p-0", agent()), 0.0)
    end(state, "p-0", 1.0)
    assert one(state, sub("p-1", agent()), 2.0).verdict == ADMITTED
    end(state, "p-1", 4.0, finish, 0)
    one(state, sub("p-2", agent(is_last=True)), 4.5)
    end(state, "p-2", 5.0)
    (history,) = state.programs.histories.values()
    assert history.table.stages[0]["requests"][:3].tolist() == [1, 1, 0]


def test_a_call_that_its_client_leaves_in_the_middle_is_a_stage() -> None:
    state = fleet()
    one(state, sub("p-0", agent()), 0.0)
    end(state, "p-0", 1.0, "abort", 7)
    assert state.programs.open["", "p"].nodes["output_tokens"].tolist() == [7]


@pytest.mark.parametrize("is_asked_again", [False, True])
def test_a_program_whose_first_call_ends_before_its_first_token_goes_on(is_asked_again: bool) -> None:
    """It is one program with one clock, and keeps its promise."""
    state = fleet()
    one(state, sub("p-0", agent()), 0.0)
    end(state, "p-0", 1.0, "abort", 0)
    program = state.programs.open["", "p"]
    assert (len(program.nodes), program.is_promised) == (0, True)
    if is_asked_again:
        stage = one(state, sub("p-1", agent(is_last=True)), 2.0).stage
        assert stage
        assert (stage.stage, stage.is_promised) == (1, True)
        assert program.started_s == 0.0
        end(state, "p-1", 3.0)
    told = state.programs.status(3.0 + state.options.programs.idle_s)
    assert (told["open"], told["failed"], told["kept"]) == ((0, 0, 1) if is_asked_again else (0, 1, 0))
    state.check_integrity()


def test_calls_that_are_refused_again_and_again_leave_nothing_behind() -> None:
    """Each left its names: of a program that asks every second for a day, some hundred thousand."""
    state = begun()
    for k in range(80):
        refused(state, f"chatcmpl-p-{k}", 2.0 + 0.01 * k)
    program = state.programs.open["", "p"]
    assert program._called.keys() == called("p-0", "")
    assert list(program.parts) == ["p-0"]


def test_a_program_without_a_stage_is_waited_for_as_after_one_call() -> None:
    """Not only as long as the shortest tool ever took, after which it would lose its place."""
    state = fleet()
    state.programs._history("", "agent").gaps_s.extend([0.0, 4.0, 5.0, 6.0, 7.0])
    one(state, sub("p-0", agent()), 0.0)
    end(state, "p-0", 1.0, "abort", 0)
    program = state.programs.open["", "p"]
    state.programs.status(5.5)
    assert state.programs.bound.promised == [program]
    assert program.held_tokens > 0.0
    state.programs.status(6.5)
    assert state.programs.bound.promised == []
