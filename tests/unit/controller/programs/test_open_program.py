"""The graph of a program under way."""

import pytest

from controller.programs.open_program import CUTS, MOST_NODES, MOST_WITHDRAWN, Left, OpenProgram, Part, called, label_of
from protocol.programs import Program, StageGiven, base_request_id

GIVEN = StageGiven(1, 1.0, 1.0, 1.0, 0.0, False)


class Play:
    """A program whose sub-requests begin and end."""

    def __init__(self) -> None:
        self.program = OpenProgram(0.0, 100.0, "app")

    def begin(self, name: str, now_s: float, tokens: int = 100, stage: str = "", parents: tuple[str, ...] = ()) -> int:
        node = self.program.arrive(name, Program("p", stage=stage, parents=parents), tokens, now_s)
        self.program.begin(name, Part(node, GIVEN, now_s + 1.0, now_s + 2.0), now_s)
        return int(self.program.nodes["stage"][node])

    def end(self, name: str, now_s: float, tokens: int = 10) -> None:
        self.program.end(self.program.parts[name], tokens, now_s)


def test_what_runs_side_by_side_is_one_stage_and_what_follows_the_next() -> None:
    play = Play()
    assert play.begin("plan", 0.0) == 0
    play.end("plan", 1.0)
    assert [play.begin(f"map-{k}", 2.0 + 0.1 * k) for k in range(3)] == [1, 1, 1]
    for k in range(3):
        play.end(f"map-{k}", 3.0 + k)
    assert play.begin("reduce", 8.0) == 2
    assert play.program.gaps_s() == 1.0 + 3.0
    assert play.program.prefix().complete == 2


def test_parents_name_stages_or_requests() -> None:
    play = Play()
    play.begin("chatcmpl-1-x", 0.0, stage="plan")
    play.end("chatcmpl-1-x", 1.0)
    assert play.begin("b", 1.0, parents=("plan",)) == 1
    assert play.begin("c", 1.5, parents=("chatcmpl-1",)) == 1
    assert play.begin("d", 2.0, parents=("b", "c")) == 2, "though its parents still run"
    assert play.begin("e", 2.0, parents=("nobody",)) == 2, "unknown: beside what runs"


def test_a_stage_of_another_name_is_another_stage() -> None:
    play = Play()
    play.begin("a", 0.0, stage="search")
    assert play.begin("b", 0.1, stage="search") == 0
    assert play.begin("c", 0.2, stage="write") == 1
    for name in ("a", "b", "c"):
        play.end(name, 1.0)
    assert play.begin("d", 2.0, stage="write") == 2, "a loop: the stage before has ended"


def test_a_growing_prompt_is_fresh_beyond_the_longest_conversation_it_can_continue() -> None:
    play = Play()
    play.begin("a", 0.0, tokens=1000)
    play.end("a", 1.0, tokens=50)
    play.begin("b", 2.0, tokens=1300)
    play.end("b", 3.0)
    play.begin("c", 4.0, tokens=600)
    assert play.program.nodes["fresh_tokens"].tolist() == [1000, 250, 600]


def test_a_part_that_asks_again_runs_again() -> None:
    play = Play()
    play.begin("a", 0.0)
    play.end("a", 1.0)
    assert not play.program.is_running
    play.program.resume(play.program.parts["a"], 2.0)
    assert play.program.is_running
    assert play.program.prefix().complete == 0


def test_what_is_withdrawn_leaves_no_trace() -> None:
    play = Play()
    play.begin("a", 0.0, 1000, stage="plan")
    play.begin("gone", 0.5, 5000, stage="plan")
    play.begin("c", 0.6, 2000, stage="plan")
    play.program.withdraw("gone", 0.7)
    assert play.program.nodes["input_tokens"].tolist() == [1000, 2000]
    assert (play.program.running, list(play.program.parts)) == (2, ["a", "c"])
    play.end("a", 1.0)
    play.end("c", 2.0)
    assert play.program.nodes["end_s"].tolist() == [1.0, 2.0]
    assert play.begin("beside", 3.0, parents=("gone",)) == 1, "nobody is called so any more"
    play.program.withdraw("beside", 3.0)
    assert play.begin("after", 3.5, 2500, parents=("c",)) == 1
    assert play.program.nodes["fresh_tokens"][2] == 2500 - 2010


def test_tools_have_run_until_a_call_asked_first() -> None:
    play = Play()
    play.begin("a", 0.0, 1000)
    play.end("a", 1.0)
    for k, at_s in enumerate((3.0, 5.0, 8.0)):
        play.begin(f"again-{k}", at_s, 2000)
        play.program.withdraw(f"again-{k}", at_s + 0.5)
    play.begin("another", 9.0, 1999)
    assert play.program.gaps_s() == 8.0, "with another prompt it is another call"
    play.program.withdraw("another", 9.0)
    play.begin("served", 10.0, 2000)
    assert play.program.gaps_s() == 2.0
    play.end("served", 11.0)
    play.begin("next", 15.0, 2000)
    assert play.program.gaps_s() == 2.0 + 4.0


@pytest.mark.parametrize(("stages", "gap_s"), [(1, 0.0), (2, 9.0)])
def test_a_call_as_long_as_one_that_never_came_back_is_another(stages: int, gap_s: float) -> None:
    """Where only its siblings have ended since, it is the same: it has waited for us."""
    play = Play()
    play.begin("a", 0.0, 1000)
    play.end("a", 1.0)
    play.begin("sibling", 2.0, 3000)
    play.begin("gone", 2.0, 2000)
    play.program.withdraw("gone", 2.5)
    play.end("sibling", 3.0)
    if stages == 2:
        play.begin("c", 4.0, 4000)
        play.end("c", 5.0)
    play.begin("later", 14.0, 2000)
    assert play.program.stages()["gap_s"][-1] == gap_s


def test_calls_that_never_come_back_are_forgotten() -> None:
    play = Play()
    play.begin("a", 0.0)
    for k in range(2 * MOST_WITHDRAWN):
        play.begin(f"{k}", 1.0, 1000 + k)
        play.program.withdraw(f"{k}", 1.0)
    assert len(play.program._withdrawn) == MOST_WITHDRAWN


def test_a_call_that_is_withdrawn_does_not_take_back_what_another_said() -> None:
    play = Play()
    for name in ("last", "beside"):
        play.begin(name, 0.0)
    play.program.is_last = play.program.parts["last"].is_last = True
    play.program.withdraw("beside", 0.5)
    assert play.program.is_last
    play.program.withdraw("last", 0.6)
    assert not play.program.is_last


def test_what_is_left_includes_a_stage_that_was_withdrawn() -> None:
    play = Play()
    play.begin("a", 0.0)
    play.program.left, play.program.later = Left(9.0), Left(6.0)
    play.end("a", 1.0)
    assert play.program.left == Left(6.0)
    play.begin("b", 2.0)
    play.program.left, play.program.later = Left(5.0), Left(2.0)
    play.program.withdraw("b", 2.0)
    assert play.program.left == play.program.later == Left(5.0)
    play.begin("b", 3.0)
    play.begin("beside", 3.0)
    play.program.left, play.program.later = Left(5.0), Left(2.0)
    play.end("b", 4.0)
    assert play.program.left == Left(5.0)
    play.program.withdraw("beside", 4.0)
    assert play.program.left == Left(2.0)


def test_a_stage_that_is_withdrawn_below_a_later_one_is_not_still_to_come() -> None:
    play = Play()
    play.begin("waits", 0.0)
    play.begin("after", 0.5, parents=("waits",))
    play.program.left, play.program.later = Left(5.0), Left(2.0)
    play.program.withdraw("waits", 1.0)
    assert (play.program.left, play.program.later) == (Left(5.0), Left(2.0))


def test_the_slowest_sibling_is_the_one_due_last() -> None:
    play = Play()
    play.begin("a", 0.0)
    play.begin("b", 5.0)
    assert play.program.slowest_s(0) == 6.0
    play.end("b", 5.5)
    assert play.program.slowest_s(0) == 1.0
    assert play.program.slowest_s(1) == 0.0


def test_there_are_bounds() -> None:
    play = Play()
    for k in range(MOST_NODES):
        assert not play.program.is_full
        play.program.arrive(f"{k}", Program("p"), 10, 0.0)
    assert play.program.is_full


def test_a_response_is_called_by_what_its_engine_request_begins_with() -> None:
    assert called("cmpl-a1-0-f3", "plan") == {"plan", "cmpl-a1-0-f3", "cmpl-a1-0", "cmpl-a1", "cmpl"}
    assert called("chatcmpl-a1_2", "") == {"chatcmpl-a1_2", "chatcmpl-a1", "chatcmpl"}
    assert len(called("-".join(100 * "a"), "")) == 1 + CUTS
    assert called("a", "") == {"a"}


def test_what_runs_is_counted_once_however_often_it_asks() -> None:
    play = Play()
    play.begin("a", 0.0)
    play.program.resume(play.program.parts["a"], 0.5)
    play.begin("b", 0.0)
    play.end("a", 1.0)
    play.end("a", 1.0)
    assert play.program.running == 1
    play.program.resume(play.program.parts["a"], 1.5)
    play.end("b", 2.0)
    assert play.program.is_running
    play.end("a", 3.0)
    assert not play.program.is_running


def test_labels_are_sets_and_silence_is_zero() -> None:
    assert label_of("", ()) == 0
    assert label_of("m", ("a", "b")) == label_of("m", ("b", "a", "a")) != label_of("m", ("a",))


def test_attempts_of_a_request_are_the_same_request() -> None:
    assert base_request_id("a~b~12") == "a~b"
    assert base_request_id("a~b") == "a~b"
    assert base_request_id("a") == "a"


def test_a_prompt_continues_the_conversation_of_its_parents() -> None:
    play = Play()
    for name, tokens in (("long", 400), ("short", 100)):
        play.begin(name, 0.0, tokens)
        play.end(name, 1.0)
    play.begin("by-name", 2.0, 500, parents=("short",))
    play.begin("by-size", 2.0, 500)
    assert play.program.nodes["fresh_tokens"][2:].tolist() == [500 - 110, 500 - 410]
