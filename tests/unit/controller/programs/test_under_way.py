"""How programs are followed and end, whatever becomes of the messages about them and whoever sends them."""

from collections.abc import Iterator

import msgspec
import pytest

from controller.programs import under_way
from controller.programs.checks import Key
from controller.programs.open_program import OpenProgram
from controller.programs.under_way import MOST_HISTORIES
from protocol.messages import Verdict
from protocol.programs import RELEASED, Program
from tests.support.fleet_cases import LOOSE, TIGHT, fleet, report
from tests.support.program_cases import chain
from tests.unit.controller.programs.test_programs import DEADLINE_S, agent, end, fill, one, play, sub


def test_a_decision_that_is_not_followed_ends_no_part_of_a_program() -> None:
    """It came too late for its ingress, which sends the request under another name."""
    state = fleet()
    one(state, sub("p-0", agent(is_last=True)), 0.0)
    end(state, "p-0", 0.3, RELEASED, 0)
    assert state.programs.status(0.4)["open"] == 1
    end(state, "p-0~1", 1.2)
    told = state.programs.status(1.3)
    assert (told["open"], told["failed"], told["on_time"], told["kept"]) == (0, 0, 1, 1)


def test_a_call_whose_ingress_is_gone_ends_once_no_replica_has_it() -> None:
    state = fleet()
    one(state, sub("p-0", agent()), 0.0)
    assert state.programs.places.tokens > 0.0
    idle_s = state.options.programs.idle_s
    for k in range(1, 4):
        state.report(report("a", 10_000 + k), k * idle_s)
        state.programs.status(k * idle_s + 1.0)
    told = state.programs.status(3.0 * idle_s + 2.0)
    assert (told["open"], told["failed"], told["on_time"], told["kept"]) == (0, 1, 0, 0)
    assert state.programs.places.tokens == 0.0


def test_whoever_names_ever_new_applications_loses_own_graphs_alone() -> None:
    state = fleet()
    play(state, "known", 0.0)
    (known,) = state.programs.histories
    for k in range(MOST_HISTORIES + 5):
        told = Program(f"m{k}", DEADLINE_S, app=f"app {k}")
        one(state, sub(f"m{k}-0", told, tenant="mallory"), 20.0 + 0.01 * k)
    assert len(state.programs.histories) == MOST_HISTORIES
    assert known in state.programs.histories


def test_whoever_has_too_many_long_graphs_loses_own_ones_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """256 histories with a session of 500 calls each would take 8 GB."""
    state, (short, long) = fleet(), (chain(*((100.0, 10.0),) * stages) for stages in (4, 400))
    programs = state.programs
    programs.learn("other", "a", short, 0.0)
    programs.learn("busy", "0", long, 0.0)
    each = programs.histories["busy", "0"].nbytes
    monkeypatch.setattr(under_way, "MOST_BYTES", 3.5 * each)
    for k in range(1, 6):
        programs.learn("busy", f"{k}", long, float(k))
        programs._history("busy", "1")  # is used
    assert [*programs.histories] == [("other", "a"), ("busy", "4"), ("busy", "5"), ("busy", "1")]
    assert sum(history.nbytes for history in programs.histories.values()) == programs._known_bytes
    assert programs._known_bytes <= under_way.MOST_BYTES


def test_what_histories_take_is_told_also_where_some_are_forgotten() -> None:
    programs = fleet().programs
    for k in range(MOST_HISTORIES + 9):
        programs._history("busy", f"{k}")
    assert sum(history.nbytes for history in programs.histories.values()) == programs._known_bytes


def test_whoever_begins_too_many_programs_loses_own_ones_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that began first was closed, as failed: a long task of somebody else, while it ran."""
    monkeypatch.setattr(under_way, "MOST_OPEN", 5)
    state = fleet()
    one(state, sub("p-0", agent(deadline_s=600.0), tenant="other"), 0.0)
    for k in range(12):
        name = f"s{k % 10}"  # the first two call again
        one(state, sub(f"s-{k}", Program(name, is_session=True), slo=LOOSE, tenant="busy"), 1.0 + k)
    assert [*state.programs.open] == [("other", "p"), *(("busy", f"s{k}") for k in (8, 9, 0, 1))]
    told = state.programs.status(15.0)
    assert (told["open"], told["failed"]) == (5, 0)
    assert [[*own] for own in state.programs._open_of.values()] == [[("other", "p")], [*state.programs.open][1:]]
    state.programs._close(("other", "p"), 16.0)
    assert [*state.programs._open_of] == ["busy"]


def test_programs_of_other_tenants_are_not_searched_for_the_one_that_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 20,000 open ones each further one took half a millisecond."""
    monkeypatch.setattr(under_way, "MOST_OPEN", 9)
    state, looks = fleet(), 0

    class Counted(dict[Key, OpenProgram]):
        def __iter__(self) -> Iterator[Key]:
            nonlocal looks
            looks += 1
            return super().__iter__()

    state.programs.open = Counted()
    for k in range(15):
        one(state, sub(f"{k}-0", agent(f"{k}"), tenant="other" if k < 4 else "busy"), float(k))
    assert len(state.programs.open) == 9
    assert not looks


def test_a_program_whose_latest_call_began_longest_ago_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_way, "MOST_OPEN", 2)
    state = fleet()
    for k, name in enumerate(("a", "b", "a", "c")):
        one(state, sub(f"{name}-{k}", agent(name)), float(k))
    assert [key[1] for key in state.programs.open] == ["a", "c"]


def test_a_call_that_another_controller_is_asked_for_is_not_refused_here() -> None:
    state = fleet()
    fill(state, 0.0)
    decision = one(state, sub("p-0", agent(), 4000, TIGHT, may_hop=True), 0.0, is_full=True)
    assert (decision.verdict, state.programs.counts.refused) == (Verdict.ELSEWHERE, 0)


def test_a_look_at_the_very_time_that_was_noted_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded differently, sum and difference made it look for ever."""
    state, ended_s = fleet(), 61.938927774648576
    idle_s = state.options.programs.idle_s
    assert (ended_s + idle_s) - ended_s < idle_s
    one(state, sub("p-0", agent()), ended_s - 1.0)
    end(state, "p-0", ended_s)
    looks = []
    at = state.programs.checks.at

    def counted(when_s: float, key: tuple[str, str], program: OpenProgram) -> None:
        looks.append(when_s)
        assert len(looks) < 10
        at(when_s, key, program)

    monkeypatch.setattr(state.programs.checks, "at", counted)
    assert state.programs.status(ended_s + idle_s)["open"] == 0


def test_no_tool_has_run_for_what_a_program_is_older_than_was_known() -> None:
    """After a new controller has begun: the ingress of the next call knows the program, that of this one did not. What
    it was older by counted as tool time, also in what was learnt."""
    state, start_s, older_s = fleet(), 1000.0, 200.0
    told = Program("p", 600.0, app="agent")
    one(state, sub("p-0", told), start_s)
    end(state, "p-0", start_s + 1.0, "abort", 0)
    one(state, sub("p-1", told), start_s + 2.0)
    end(state, "p-1", start_s + 4.0)
    program = state.programs.open["", "p"]
    known = msgspec.structs.replace(told, age_s=older_s + 7.0, is_last=True)
    one(state, sub("p-2", known), start_s + 7.0)
    assert program.due_s == pytest.approx(start_s - older_s + 600.0)
    assert program.gaps_s() == pytest.approx(3.0)
    assert program.nodes["begin_s"].tolist() == pytest.approx([older_s, older_s + 7.0]), "as of its first attempt"
    end(state, "p-2", start_s + 8.0)
    (history,) = state.programs.histories.values()
    assert history.table.stages["gap_s"][0, :2].tolist() == pytest.approx([0.0, 3.0])
    assert list(history.gaps_s) == [pytest.approx(3.0)]
