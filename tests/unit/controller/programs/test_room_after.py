"""When a program comes back that was one too many."""

import msgspec
import pytest

from controller.fleet import Fleet
from controller.options import FleetOptions
from controller.programs.bound import ProgramBound
from controller.programs.open_program import Left, OpenProgram
from controller.programs.programs import TOO_MANY
from controller.scaling.tiers import Tier, TierTable
from profiles.store import load_profile
from protocol.messages import Decision, Slo, Verdict
from protocol.programs import Program
from tests.support.fleet_cases import fleet
from tests.unit.controller.programs.test_bound import DEADLINE_S, call, end, one, open_until_full


@pytest.mark.parametrize("work_s", [3.0, 30.0])
def test_who_returns_when_told_fits_if_the_work_was_served_at_the_pace_assumed(work_s: float) -> None:
    """However little work it has itself: what is over is due to all of them together."""
    state = fleet()
    one(state, call("first"), 0.0)
    bound, left = ProgramBound(state.slots), Left(work_s, 1.0, 10.0, all_idle_s=1.0, all_gaps_s=10.0)
    others = [OpenProgram(0.0, 100.0, "a", is_promised=True, left=left._replace(work_s=16.0)) for _ in range(4)]
    for program in others:
        bound.note(program)
    newcomer = OpenProgram(0.0, 100.0, "a", left=left)
    assert bound.is_too_much(newcomer, 0.0)
    rate, back_s = (64.0 + work_s) / (100.0 * newcomer.load), newcomer.room_after_s
    for program in others:
        program.left = program.left._replace(work_s=16.0 - rate * back_s / len(others))
        bound.note(program)
    assert bound.load(OpenProgram(back_s, 100.0, "a", left=left), back_s) == pytest.approx(1.0)


@pytest.mark.parametrize(("due_s", "is_too_much"), [(1000.0, False), (5.0, True)])
def test_a_program_that_is_hardly_in_time_turns_away_only_those_who_are_due_before_it(
    due_s: float, is_too_much: bool
) -> None:
    state = fleet()
    one(state, call("first"), 0.0)
    bound = ProgramBound(state.slots)
    bound.note(OpenProgram(0.0, 10.0, "a", is_promised=True, left=Left(9.0, 9.0, all_idle_s=9.0)))
    newcomer = OpenProgram(0.0, due_s, "a", left=Left(1.0, 1.0, all_idle_s=1.0))
    assert bound.is_too_much(newcomer, 0.0) == is_too_much
    assert (newcomer.room_after_s > 0.0) == is_too_much


@pytest.mark.parametrize("late_s", [-1.0, 1.0])
def test_whom_no_wait_would_help_is_told_no_time_to_return(late_s: float) -> None:
    """Its deadline is over, or leaves no time for what is known of its kind; what it was told before is old."""
    tight, loose = Tier("tight", 0.3, 0.03, unattainable="refuse"), Tier("loose", 3.0, 0.1)
    state = Fleet(FleetOptions(length_prior_tokens=100.0, pending=False), TierTable.of(1, [tight, loose]), load_profile)
    name = one_too_many(state)
    earlier = state.programs.open["", name].room_after_s
    told = one(state, call(name, 1, 1000, Slo(e2e_s=DEADLINE_S, tier="tight")), DEADLINE_S + late_s)
    assert (told.verdict, told.reason) == (Verdict.REFUSED, TOO_MANY)
    assert earlier > 0.0
    assert told.retry_after_s == 0.0


def test_a_promise_that_an_ingress_remembers_ends_what_was_said_against_it() -> None:
    """A new controller had turned the program away, and gave that for the reason where a later call found no room."""
    tight, loose = Tier("tight", 0.3, 0.03, unattainable="refuse"), Tier("loose", 3.0, 0.1)
    state = Fleet(FleetOptions(length_prior_tokens=100.0, pending=False), TierTable.of(1, [tight, loose]), load_profile)
    name, slo = one_too_many(state), Slo(e2e_s=DEADLINE_S, tier="tight")
    assert state.programs.open["", name].refusal == TOO_MANY
    decisions = list[Decision]()
    for k, prompt_tokens in enumerate((100, 300_000, 300_000), 1):  # the last is more than goes before others
        asked = call(name, k, prompt_tokens, slo)
        told = Program(name, DEADLINE_S, age_s=16.0 + k, is_promised=True, app="a")
        decisions.append(one(state, msgspec.structs.replace(asked, program=told), 16.0 + k))
    assert [d.stage and d.stage.is_promised for d in decisions] == [True] * 3
    assert [(d.verdict, d.reason) for d in decisions[1:]] == [
        (Verdict.ADMITTED, "program_promised"),
        (Verdict.REFUSED, "deadline_unattainable"),
    ]


def test_without_a_replica_that_is_the_reason_and_not_that_programs_are_too_many() -> None:
    """A stream that has lost its replica waits for another one then, and is not turned away."""
    state = fleet()
    count, _ = open_until_full(state)
    state.programs.give_stages([call(f"p{count}", 1)], 8.0)
    assert state.programs.open["", f"p{count}"].refusal == TOO_MANY
    (told,) = state.programs.told([Decision(f"p{count}-1", Verdict.REFUSED, "", "tight", "no_replica")], 8.0)
    assert (told.reason, told.retry_after_s) == ("no_replica", 0.0)


def one_too_many(state: Fleet) -> str:
    """The first program that is turned away; those before it end with their second calls, 15 s after they began."""
    slo = Slo(e2e_s=DEADLINE_S, tier="loose", is_tier_open=True)
    for k in range(50):
        if one(state, call(f"p{k}", slo=slo), 0.0).reason == TOO_MANY:
            break
        end(state, f"p{k}-0", 0.05)
    for known in range(k):
        last = msgspec.structs.replace(
            call(f"p{known}", 1), program=Program(f"p{known}", DEADLINE_S, is_last=True, app="a")
        )
        one(state, last, 15.0)
        end(state, f"p{known}-1", 15.5)
    end(state, f"p{k}-0", 16.0)
    return f"p{k}"
