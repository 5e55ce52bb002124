"""Programs without a promise run side by side as far as the KV caches hold their conversations; the others wait."""

import msgspec
import pytest

from controller.fleet import Fleet
from controller.programs.checks import Checks
from controller.programs.open_program import Left, OpenProgram
from controller.programs.options import ProgramOptions
from controller.programs.places import HOPELESS, USABLE, ProgramPlaces
from controller.programs.programs import TOO_MANY
from protocol.messages import Decision, Slo, Verdict
from tests.support.fleet_cases import fleet, report
from tests.unit.controller.programs.test_bound import OPEN, call, end, open_until_full

ROOM = 400_000 * USABLE[HOPELESS]


def program(started_s: float, context_tokens: float) -> OpenProgram:
    return OpenProgram(started_s, 60.0, "a", left=Left(context_tokens=context_tokens), refusal=TOO_MANY)


@pytest.fixture
def places() -> ProgramPlaces:
    state = fleet()
    state.report(report("a"), 0.0)
    state.slots.fleet_state.replicas["is_open"] = state.open_slots(0.0)
    return ProgramPlaces(state.slots)


def test_conversations_fill_the_caches_and_no_more(places: ProgramPlaces) -> None:
    assert places.wait_s(program(0.0, 0.6 * ROOM), 1, 0.0) == 0.0
    assert places.wait_s(program(1.0, 0.5 * ROOM), 2, 1.0) > 0.0
    assert places.tokens == pytest.approx(0.6 * ROOM)
    assert len(places.line) == 1


def test_a_conversation_that_fits_no_cache_runs_alone(places: ProgramPlaces) -> None:
    assert places.wait_s(program(0.0, 9 * ROOM), 1, 0.0) == 0.0
    assert places.wait_s(program(0.0, 1.0), 2, 0.0) > 0.0


def test_a_place_goes_to_the_program_that_is_due_first(places: ProgramPlaces) -> None:
    first, second, third = (program(float(k), 0.6 * ROOM) for k in range(3))
    places.take(first)
    assert places.wait_s(third, 3, 3.0) > 0.0
    assert places.wait_s(second, 2, 3.0) > 0.0
    places.give_up(first)
    assert places.wait_s(third, 3, 3.2) > 0.0, "the second is ahead of it, though it asked later"
    assert places.wait_s(second, 2, 3.2) == 0.0
    assert places.tokens == pytest.approx(0.6 * ROOM)


def test_a_program_that_does_not_fit_holds_up_others_for_a_while_at_a_time(places: ProgramPlaces) -> None:
    """Promised programs may leave it no room for ever."""
    places.take(promised := program(0.0, 0.5 * ROOM))
    large, began_s = program(1.0, 0.9 * ROOM), 1.0
    large.deadline_s = 1000.0
    passed: dict[int, int] = {}
    for second in range(161):
        now_s = began_s + second
        assert places.wait_s(large, 1, now_s) > 0.0
        small = program(now_s, 0.1 * ROOM)
        small.deadline_s = 2000.0
        if places.wait_s(small, uid := 2 + second, now_s) == 0.0:
            passed[second] = uid
            places.give_up(small)
        places.line.leave(uid)
    assert sorted(passed) == [*range(10, 20), *range(40, 80), 160]
    assert len(places.line) == 1
    places.give_up(promised)
    assert places.wait_s(large, 1, 300.0) == 0.0
    assert places.wait_s(program(301.0, 0.2 * ROOM), 400, 301.0) > 0.0, (
        "one that has just become the first is not passed"
    )
    assert places.wait_s(program(302.0, 0.05 * ROOM), 401, 302.0) > 0.0


def test_a_place_grows_with_its_conversation(places: ProgramPlaces) -> None:
    own = program(0.0, 100.0)
    places.take(own)
    own.left = Left(context_tokens=300.0)
    places.take(own)
    assert places.tokens == 300.0
    places.give_up(own)
    places.give_up(own)
    assert places.tokens == 0.0


def test_whoever_is_next_asks_again_at_once_however_slowly_the_line_moves(places: ProgramPlaces) -> None:
    blocking = program(0.0, ROOM)
    places.take(blocking)
    for uid in range(1, 4):
        assert places.wait_s(program(float(uid), ROOM), uid, 0.0) > 0.0
    for uid in range(1, 3):  # one place in 100 seconds
        places.give_up(blocking)
        blocking = program(float(uid), ROOM)
        assert places.wait_s(blocking, uid, 100.0 * uid) == 0.0
    assert places.wait_s(program(3.0, ROOM), 3, 200.0) < 0.5


def test_who_may_be_promised_goes_first_then_by_deadline_and_the_hopeless_last(places: ProgramPlaces) -> None:
    places.take(blocking := program(0.0, ROOM))
    waiting = {uid: program(float(uid), 0.9 * ROOM) for uid in range(1, 6)}
    for uid, own in waiting.items():
        own.refusal = "" if uid == 4 else TOO_MANY
        own.deadline_s = 60.0 - 10.0 * uid if uid != 4 else 1000.0
    waiting[5].left = waiting[5].left._replace(idle_s=10.0)  # due at 15, and would take until 16
    for uid, own in waiting.items():
        assert places.wait_s(own, uid, 1.0) > 0.0
    went = []
    for step in range(1, 6):
        places.give_up(blocking)
        for uid in sorted(waiting, reverse=step % 2 == 0):
            if places.wait_s(waiting[uid], uid, 1.0 + 0.01 * step) == 0.0:
                went.append(uid)
                blocking = waiting.pop(uid)
                break
    assert went == [4, 3, 2, 1, 5]


def test_programs_without_a_promise_leave_some_room_free(places: ProgramPlaces) -> None:
    places.take(program(0.0, 0.5 * 400_000))
    newcomer = program(1.0, 0.5 * 400_000)
    assert places.wait_s(newcomer, 1, 1.0) > 0.0
    newcomer.refusal = ""
    assert places.wait_s(newcomer, 1, 1.1) == 0.0


def test_who_becomes_hopeless_in_line_is_passed(places: ProgramPlaces) -> None:
    places.take(blocking := program(0.0, ROOM))
    first, second = program(0.0, 0.9 * ROOM), program(1.0, 0.9 * ROOM)
    for own in (first, second):
        own.refusal = TOO_MANY
    first.left = first.left._replace(idle_s=20.0)  # 30 s on a busy engine
    assert places.wait_s(first, 1, 29.0) > 0.0
    assert places.wait_s(second, 2, 29.0) > 0.0
    assert places.wait_s(first, 1, 30.1) > 0.0
    places.give_up(blocking)
    assert places.wait_s(first, 1, 30.2) > 0.0
    assert places.wait_s(second, 2, 30.2) == 0.0


def one(state: Fleet, name: str, now_s: float, number: int = 0, slo: Slo = OPEN) -> Decision:
    state.report(report("a", int(now_s * 1000) + 1), now_s)
    return state.admit([call(name, number, slo=slo)], now_s)[0]


def test_a_program_that_is_not_promised_waits_for_a_place_and_keeps_it() -> None:
    state = fleet(programs=ProgramOptions(asks_again=False))
    count, decision = open_until_full(state)
    turned_away, now_s = [f"p{count}"], 0.1 * count
    while decision.verdict == Verdict.BEST_EFFORT:
        now_s, name = now_s + 0.1, f"q{len(turned_away)}"
        turned_away.append(name)
        decision = one(state, name, now_s)
    assert (decision.verdict, decision.retry_after_s > 0.0) == (Verdict.PENDING, True)
    waiting = turned_away.pop()
    assert state.programs.status(now_s)["waiting"] == 1
    end(state, f"{turned_away[0]}-0", now_s)
    again = one(state, turned_away[0], now_s + 0.1, 1)
    assert (again.verdict, again.reason) == (Verdict.BEST_EFFORT, TOO_MANY), "it has its place from its first call on"
    assert one(state, waiting, now_s + 0.2).verdict == Verdict.PENDING
    state.programs._close(("", turned_away[0]), now_s + 0.2)
    assert one(state, waiting, now_s + 0.3).verdict == Verdict.BEST_EFFORT
    assert state.programs.status(now_s)["waiting"] == 0
    state.check_integrity()


def test_places_can_be_off() -> None:
    state = fleet(programs=ProgramOptions(has_places=False))
    open_until_full(state)
    state.programs.places.tokens = 10 * ROOM
    assert one(state, "x", 9.0).verdict == Verdict.BEST_EFFORT


def test_programs_without_a_deadline_need_no_place() -> None:
    state = fleet()
    open_until_full(state)
    state.programs.places.tokens = 10 * ROOM
    unbounded = msgspec.structs.replace(OPEN, e2e_s=float("inf"))
    assert one(state, "x", 9.0, slo=unbounded).verdict != Verdict.PENDING
    assert one(state, "y", 9.1).verdict == Verdict.PENDING


def test_a_program_that_seems_to_have_ended_gives_up_its_place_until_it_is_heard_again() -> None:
    state = fleet()
    one(state, "p", 0.0)
    opened = state.programs.open["", "p"]
    opened.patience_s = 5.0
    end(state, "p-0", 1.0)
    one(state, "q", 5.9)
    assert opened.held_tokens > 0.0
    one(state, "q", 6.1, 1)
    assert opened.held_tokens == 0.0
    assert opened not in state.programs.bound.promised
    assert ("", "p") in state.programs.open, "it may still go on"
    one(state, "p", 8.0, 1)
    assert opened.held_tokens > 0.0
    assert opened in state.programs.bound.promised


def test_of_a_programs_checks_the_latest_counts() -> None:
    checks, own = Checks(), program(0.0, 1.0)
    for when_s in (1.0, 3.0, 2.0):
        checks.at(when_s, ("", "p"), own)
    assert list(checks.due(1.5)) == []
    assert list(checks.due(9.0)) == [(("", "p"), own)]
    assert list(checks.due(9.0)) == []


def test_rounding_is_nobody(places: ProgramPlaces) -> None:
    """Sums of fractions do not come back to nought."""
    places.tokens = 1e-9
    assert places.wait_s(program(0.0, 9 * ROOM), 1, 0.0) == 0.0
