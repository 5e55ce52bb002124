"""The bound on open programs: who is promised, who yields, and how the limit follows how programs end."""

import msgspec
import numpy as np
import pytest

from controller.fleet import Fleet
from controller.options import FleetOptions
from controller.programs.bound import KEPT, LEAST, MOST, NEEDLESS, ProgramBound
from controller.programs.open_program import Left, OpenProgram, Part
from controller.programs.options import ProgramOptions
from controller.programs.programs import TOO_MANY
from controller.scaling.tiers import Tier, TierTable
from profiles.store import load_profile
from protocol.messages import AdmissionRequest, Decision, Outcome, Slo, Verdict
from protocol.programs import INF, Program, StageGiven
from tests.support.fleet_cases import fleet, report

DEADLINE_S = 60.0
LONG_PROMPT = 60_000  # of the 400,000 tokens that the replica holds
OPEN = Slo(e2e_s=DEADLINE_S, tier="tight", is_tier_open=True)


def call(program: str, number: int = 0, prompt_tokens: int = LONG_PROMPT, slo: Slo = OPEN) -> AdmissionRequest:
    return AdmissionRequest(
        f"{program}-{number}", prompt_tokens, 200, slo, program=Program(program, slo.e2e_s, app="a")
    )


def one(state: Fleet, request: AdmissionRequest, now_s: float) -> Decision:
    """The decision on one request by an idle replica: only the bound can say no."""
    state.report(report("a", int(now_s * 1000) + 1), now_s)
    return state.admit([request], now_s)[0]


def end(state: Fleet, name: str, now_s: float) -> None:
    told = (True, 0.1, 0.01, 1.0, 0.1, 0.01, 100, Verdict.ADMITTED)
    state.on_outcome(Outcome(name, "tight", "tight", "stop", *told), now_s)


def scale(bound: ProgramBound, tenant: str = "") -> float:
    return bound.scales.get(tenant, 1.0)


def open_until_full(state: Fleet) -> tuple[int, Decision]:
    """How many programs are promised whose first calls end at once, and what the next one is told."""
    for k in range(50):
        decision = one(state, call(f"p{k}"), 0.1 * k)
        if decision.reason == TOO_MANY:
            return k, decision
        assert decision.stage
        assert decision.stage.is_promised
        end(state, f"p{k}-0", 0.1 * k + 0.05)
    raise AssertionError("nobody was turned away")


def test_programs_are_promised_until_they_would_be_too_many() -> None:
    count, decision = open_until_full(fleet())
    assert 2 <= count < 10
    assert decision.verdict == Verdict.BEST_EFFORT
    assert decision.stage
    assert not decision.stage.is_promised


def test_a_tier_that_refuses_says_when_to_come_back() -> None:
    state = fleet(unattainable="refuse")
    count, decision = open_until_full(state)
    assert decision.verdict == Verdict.REFUSED
    assert decision.retry_after_s > 0.0
    assert ("", f"p{count}") not in state.programs.open


def test_without_the_bound_all_are_promised() -> None:
    with pytest.raises(AssertionError, match="nobody was turned away"):
        open_until_full(fleet(programs=ProgramOptions(bounded=False, has_places=False)))


def test_later_calls_keep_the_promise_or_yield_as_the_first_call_was_told() -> None:
    state = fleet()
    count, _ = open_until_full(state)
    promised, turned_away = one(state, call("p0", 1), 8.0), one(state, call(f"p{count}", 1), 8.0)
    assert promised.verdict == Verdict.ADMITTED
    assert (turned_away.verdict, turned_away.reason) == (Verdict.BEST_EFFORT, TOO_MANY)
    state.check_integrity()


def test_the_tightest_tier_refuses_no_program_that_did_not_ask_for_it() -> None:
    """A call that must yield is due at once: no tier has that pace."""
    tight, loose = Tier("tight", 0.3, 0.03, unattainable="refuse"), Tier("loose", 3.0, 0.1)
    state = Fleet(FleetOptions(length_prior_tokens=100.0, pending=False), TierTable.of(1, [tight, loose]), load_profile)
    slo = msgspec.structs.replace(OPEN, tier="loose")
    decision = None
    for k in range(50):
        if decision and decision.reason == TOO_MANY:
            break
        decision = one(state, call(f"p{k}", slo=slo), 0.1 * k)
        end(state, f"p{k}-0", 0.1 * k + 0.05)
    assert decision
    assert (decision.verdict, decision.reason) == (Verdict.BEST_EFFORT, TOO_MANY)


def test_programs_that_have_ended_make_room() -> None:
    state = fleet()
    count, _ = open_until_full(state)
    for k in range(count):
        last = msgspec.structs.replace(Program(f"p{k}", DEADLINE_S, app="a"), is_last=True)
        one(state, msgspec.structs.replace(call(f"p{k}", 1), program=last), 8.0)
        end(state, f"p{k}-1", 8.5)
    decision = one(state, call("new"), 9.0)
    assert decision.stage
    assert decision.stage.is_promised


def test_a_program_that_was_one_too_many_is_promised_with_its_next_call_when_there_is_room() -> None:
    state = fleet()
    count, _ = open_until_full(state)
    assert not state.programs.open["", f"p{count}"].is_promised
    for k in range(count):
        last = msgspec.structs.replace(Program(f"p{k}", DEADLINE_S, app="a"), is_last=True)
        one(state, msgspec.structs.replace(call(f"p{k}", 1), program=last), 8.0)
        end(state, f"p{k}-1", 8.5)
    joins = one(state, call(f"p{count}", 1), 9.0)
    assert joins.verdict == Verdict.ADMITTED
    assert joins.stage
    assert joins.stage.is_promised
    assert len(state.programs.bound.promised) == 1, "it counts for those who come after it"
    end(state, f"p{count}-1", 9.5)
    assert state.programs.open["", f"p{count}"].precedence_tokens > 0.0


def test_who_has_waited_too_long_is_not_promised_what_its_kind_cannot_do_in_the_time_left() -> None:
    """Others like it called twice more, 6 s apart. They have ended: there is room, but its task is no smaller."""
    for left_s, is_promised in ((30.0, True), (4.0, False)):
        state = fleet()
        count, _ = open_until_full(state)
        for number, at_s in ((1, 8.0), (2, 14.5)):
            for k in range(count):
                told = msgspec.structs.replace(Program(f"p{k}", DEADLINE_S, app="a"), is_last=number == 2)
                one(state, msgspec.structs.replace(call(f"p{k}", number), program=told), at_s)
                end(state, f"p{k}-{number}", at_s + 0.5)
        joins = one(state, call(f"p{count}", 1, 1000), DEADLINE_S - left_s)
        assert joins.stage
        assert joins.stage.is_promised == is_promised


def test_the_table_of_promised_programs_holds_what_is_open() -> None:
    """Forgetting moves the last row to the place of the one that goes."""
    bound = ProgramBound(fleet().slots)
    programs = [OpenProgram(0.0, 10.0 + k, "a", is_promised=True, left=Left(float(k))) for k in range(40)]
    programs.append(OpenProgram(0.0, INF, "a", is_promised=True))
    for program in programs:
        bound.note(program)
    for gone in (0, 39, 17, 17, 40):
        bound.forget(programs[gone])
    kept = [program for k, program in enumerate(programs[:40]) if k not in (0, 17, 39)]
    assert sorted(bound.promised, key=lambda p: p.due_s) == kept
    for program in kept:
        program.left = Left(2.0 * program.left.work_s)
        bound.note(program)
        assert tuple(bound._rows[program.row, :2]) == (program.due_s, program.left.work_s)


def test_a_program_that_seems_to_be_late_keeps_its_promise_until_its_deadline() -> None:
    """Eight known programs of two calls whose second one takes a second; half of one is left, or nothing."""
    for left_s, verdict in ((0.5, Verdict.ADMITTED), (-0.5, Verdict.BEST_EFFORT)):
        state = fleet()
        for k in range(8):
            for number in range(2):
                one(state, call(f"k{k}", number, 500), 100.0 * k + 20.0 * number)
                told = (True, 0.1, 0.01, 1.0, 0.1, 0.01, 200, Verdict.ADMITTED)
                outcome = Outcome(f"k{k}-{number}", "tight", "tight", "stop", *told)
                state.on_outcome(outcome, 100.0 * k + 20.0 * number + 1.0)
        one(state, call("late", 0, 500), 2000.0)
        end(state, "late-0", 2001.0)
        assert one(state, call("late", 1, 500), 2000.0 + DEADLINE_S - left_s).verdict == verdict


def test_the_limit_follows_how_promised_programs_end() -> None:
    bound = ProgramBound(fleet().slots)
    kept, late, idle = (
        OpenProgram(0.0, 10.0, "a", is_promised=True, load=load, ended_s=end_s)
        for load, end_s in ((0.9, 9.0), (0.9, 11.0), (0.1, 9.0))
    )
    bound.note_end(idle)
    bound.note_end(OpenProgram(0.0, 10.0, "a", load=0.9, ended_s=11.0))
    bound.note_end(OpenProgram(0.0, 10.0, "a", is_promised=True, has_failed=True, load=0.9, ended_s=11.0))
    assert scale(bound) == 1.0, (
        "nothing is said by a kept promise on an idle fleet, one that was not given, or a failure"
    )
    for _ in range(19):
        bound.note_end(kept)
    assert scale(bound) > 1.0
    bound.note_end(late)
    assert scale(bound) == pytest.approx(1.0), f"{KEPT} kept is the balance"
    for _ in range(99):
        bound.note_end(late)
    assert scale(bound) == LEAST
    for _ in range(999):
        bound.note_end(kept)
    assert scale(bound) == MOST


@pytest.mark.parametrize("is_promised", [False, True])
def test_what_was_too_much_and_ends_in_time_loosens_the_limit(is_promised: bool) -> None:
    """It could have been promised at once, also where a later call was."""
    bound = ProgramBound(fleet().slots)
    turned_away = OpenProgram(0.0, 10.0, "a", is_promised=is_promised, load=0.9, was_too_much=True)
    turned_away.ended_s = 11.0
    bound.note_end(turned_away)
    assert scale(bound) < 1.0 if is_promised else scale(bound) == 1.0, (
        "late, it breaks what it was promised, if anything"
    )
    tight, turned_away.ended_s = scale(bound), 9.0
    bound.note_end(turned_away)
    assert scale(bound) == pytest.approx(tight * np.exp(NEEDLESS))


def test_a_fleet_without_admission_turns_nobody_away() -> None:
    state = fleet(admission=False)
    with pytest.raises(AssertionError):
        open_until_full(state)
    assert all(not program.refusal for program in state.programs.open.values())


def test_a_new_fleet_takes_the_limit_over() -> None:
    old, new = fleet(), fleet()
    old.programs.bound.scales[""] = 0.5
    new.adopt_state(old, 1.0)
    assert scale(new.programs.bound) == 0.5


def test_a_promise_is_broken_at_its_deadline_and_once() -> None:
    bound = ProgramBound(fleet().slots)
    given = StageGiven(1, 10.0, 10.0, 4.0, 0.0, True)
    runs, waits = OpenProgram(0.0, 10.0, "a", is_promised=True), OpenProgram(0.0, 10.0, "a", is_promised=True)
    runs.begin("r", Part(runs.arrive("r", Program("p"), 10, 0.0), given, 10.0, 10.0), 0.0)
    for program in (runs, waits):
        bound.note(program)
    bound.note_late(9.0)
    assert scale(bound) == 1.0
    bound.note_late(10.0)
    tightened = scale(bound)
    assert tightened < 1.0
    runs.ended_s = 20.0
    bound.note_late(11.0)
    bound.note_end(runs)
    assert scale(bound) == tightened


def loads(left: Left, deadline_s: float, count: int = 4) -> float:
    """Load with a newcomer beside programs like it on one replica of 400,000 KV tokens."""
    state = fleet()
    one(state, call("first"), 0.0)
    bound = ProgramBound(state.slots)
    for _ in range(count - 1):
        bound.note(OpenProgram(0.0, deadline_s, "a", is_promised=True, left=left))
    return bound.load(OpenProgram(0.0, deadline_s, "a", left=left), 0.0)


def test_contexts_beyond_the_cache_cost_work_and_are_no_reason_by_themselves() -> None:
    within, beyond = (
        Left(5.0, 4.0, 10.0, 20.0, context_tokens=tokens, all_idle_s=4.0, all_gaps_s=10.0)
        for tokens in (90_000.0, 200_000.0)
    )
    assert loads(within, 100.0) < loads(beyond, 100.0)
    assert loads(beyond, 60.0) > 1.0 > loads(beyond, 2000.0)


def test_the_same_work_is_more_where_calls_have_less_time() -> None:
    short, long = (Left(4.0, idle_s, 10.0, all_idle_s=idle_s, all_gaps_s=10.0) for idle_s in (5.0, 30.0))
    assert loads(short, 60.0, 12) < loads(long, 60.0, 12)


def test_a_newcomer_hears_of_promises_that_are_broken_by_programs_that_still_run() -> None:
    state = fleet()
    one(state, call("late", 0, 500), 0.0)
    one(state, call("new", 0, 500), DEADLINE_S + 1.0)
    assert scale(state.programs.bound) < 1.0


def test_a_tenant_that_breaks_its_own_promises_tightens_its_own_limit_alone() -> None:
    bound = ProgramBound(fleet().slots)
    for _ in range(99):
        bound.note_end(OpenProgram(0.0, 10.0, "a", "mallory", is_promised=True, load=0.9, ended_s=11.0))
    assert (scale(bound, "mallory"), scale(bound, "alice")) == (LEAST, 1.0)
