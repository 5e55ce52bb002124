"""Programs under the fleet: stages and their deadlines, promises that hold, and what becomes of them."""

import math
from typing import Any

import msgspec
import pytest

from controller.fleet import Fleet
from controller.programs.options import ProgramOptions
from controller.programs.programs import UNATTAINABLE
from controller.status import fleet_status
from protocol.messages import AdmissionRequest, Decision, Outcome, Slo, Verdict
from protocol.programs import Program
from tests.support.fleet_cases import FLEX, TIGHT, ask, fleet, report

DEADLINE_S = 20.0
OPEN = Slo(e2e_s=DEADLINE_S, tier="loose", is_tier_open=True)


def sub(name: str, program: Program, prompt_tokens: int = 500, slo: Slo = OPEN, **more: Any) -> AdmissionRequest:
    return AdmissionRequest(name, prompt_tokens, 200, slo, program=program, **more)


def agent(name: str = "p", deadline_s: float = DEADLINE_S, **more: Any) -> Program:
    return Program(name, deadline_s, app="agent", **more)


def one(state: Fleet, request: AdmissionRequest, now_s: float, is_full: bool = False) -> Decision:
    """The decision on one request, by a replica that has just reported that it is idle, or not at all."""
    if not is_full:
        state.report(report("a", int(now_s * 1000) + 1), now_s)
    return state.admit([request], now_s)[0]


def end(state: Fleet, name: str, now_s: float, finish: str = "stop", tokens: int = 100) -> None:
    told = (True, 0.1, 0.01, 1.0, 0.1, 0.01, tokens, Verdict.ADMITTED)
    state.on_outcome(Outcome(name, "loose", "loose", finish, *told), now_s)


def play(
    state: Fleet, name: str, start_s: float, rounds: int = 3, is_open: bool = False, **more: Any
) -> list[Decision]:
    """A program of equal rounds, each of a second, with two seconds of tools between; it says when it has ended."""
    decisions = []
    for k in range(rounds):
        now_s = start_s + 3.0 * k
        told = agent(name, is_last=k == rounds - 1 and not is_open, **more)
        decisions.append(one(state, sub(f"{name}-{k}", told), now_s))
        end(state, f"{name}-{k}", now_s + 1.0)
    return decisions


def fill(state: Fleet, now_s: float) -> None:
    """Promise the one replica to others, until it takes no more."""
    state.report(report("a", int(now_s * 1000) + 1), now_s)
    decisions = state.admit([ask(TIGHT, 4000) for _ in range(30)], now_s)
    assert {d.verdict for d in decisions} > {Verdict.ADMITTED}


def test_stages_of_an_unknown_program_are_due_by_the_prior_and_then_by_what_was_learnt() -> None:
    state = fleet(programs=ProgramOptions(stages="accumulated"))
    first = play(state, "p0", 0.0)
    assert [d.stage.stage for d in first if d.stage] == [1, 2, 3]
    assert next(d.stage.e2e_s for d in first if d.stage) == pytest.approx(DEADLINE_S / 4)
    assert all(d.stage and d.stage.is_promised for d in first)
    for k in range(1, 5):
        later = play(state, f"p{k}", 100.0 * k)
    given = [d.stage for d in later if d.stage]
    assert [g.stages for g in given] == [3, 3, 3]
    assert given[0].similarity > 0.99
    # 4 s of tools and three equal stages but for their prompts: the first is due at about a third of 16 s.
    assert given[0].e2e_s == pytest.approx(16.0 / 3, rel=0.1)
    assert given[2].e2e_s == pytest.approx(DEADLINE_S - 6.0), "the last one has until the deadline"


def test_a_program_may_have_more_stages_than_any_known_one() -> None:
    state = fleet()
    for start_s, rounds in ((0.0, 9), (100.0, 2), (200.0, 40)):
        told = [d.stage for d in play(state, f"program of {rounds}", start_s, rounds, deadline_s=200.0) if d.stage]
        assert [given.stage for given in told] == list(range(1, rounds + 1))


def test_by_default_a_stage_is_due_so_early_that_the_rest_can_end_in_time() -> None:
    state = fleet()
    first = play(state, "p0", 0.0)[0].stage
    assert first is not None
    assert first.e2e_s == pytest.approx(DEADLINE_S, abs=0.1), "nothing is known of the rest"
    for k in range(1, 12):
        given = [d.stage for d in play(state, f"p{k}", 100.0 * k) if d.stage]
    # Two stages of 0.7 s and 4 s of tools follow the first one; none the last.
    assert DEADLINE_S - 6.0 < given[0].e2e_s < DEADLINE_S - 4.5
    assert given[2].e2e_s == pytest.approx(DEADLINE_S - 6.0)


@pytest.mark.parametrize("is_best_effort", [False, True])
def test_a_call_that_states_nothing_has_only_the_deadline_that_its_program_said_elsewhere(is_best_effort: bool) -> None:
    state, untold = fleet(), msgspec.structs.replace(agent(), deadline_s=math.inf)
    default = msgspec.structs.replace(FLEX if is_best_effort else TIGHT, is_default=True)
    lax = sub("lax", msgspec.structs.replace(untold, id="lax"), slo=default)
    assert state.programs.give_stages([lax], 0.0)[0].slo == default, "its program has no deadline"
    one(state, sub("p-0", agent()), 0.0)
    end(state, "p-0", 1.0)
    asked = [
        sub("p-1", untold, slo=default),
        sub("p-2", untold, slo=msgspec.structs.replace(default, is_default=False)),
    ]
    by_default, named = (staged.slo for staged in state.programs.give_stages(asked, 3.0))
    assert (by_default.ttft_s, by_default.tpot_s) == (math.inf, math.inf)
    assert (by_default.best_effort, by_default.is_tier_open) == (False, True)
    assert 0.0 < by_default.e2e_s <= DEADLINE_S - 3.0
    assert (named.ttft_s, named.best_effort) == (default.ttft_s, default.best_effort)
    due_at_once = sub("p-3", untold, slo=default)
    late = state.programs.give_stages([due_at_once], 60.0)[0].slo
    assert (late.ttft_s, late.best_effort) == (default.ttft_s, default.best_effort), "its own figures tell its tier"


def test_a_stage_that_cannot_be_promised_by_its_share_may_be_by_its_latest_end() -> None:
    state = fleet(programs=ProgramOptions(stages="accumulated"))
    for k in range(12):
        play(state, f"p{k}", 100.0 * k)
    short = msgspec.structs.replace(agent("q"), deadline_s=7.0)
    request = sub("q-0", short, 20_000, msgspec.structs.replace(OPEN, e2e_s=7.0))
    decision = one(state, request, 2000.0)
    assert decision.verdict == Verdict.ADMITTED
    state.check_integrity()


def test_status_counts_programs() -> None:
    state = fleet()
    play(state, "p0", 0.0)
    one(state, sub("late-0", agent("late")), 100.0)
    end(state, "late-0", 101.0)
    one(state, sub("late-1", agent("late", is_last=True)), 119.0)
    end(state, "late-1", 121.0)
    told = fleet_status(state, 121.0)["programs"]
    assert (told["on_time"], told["late"], told["promised"], told["kept"]) == (1, 1, 2, 1)
    assert (told["on_time_share"], told["known_graphs"], told["open"]) == (0.5, 2, 0)


def test_a_program_without_a_sign_of_life_has_ended() -> None:
    state = fleet(programs=ProgramOptions(idle_s=30.0))
    one(state, sub("a-0", agent("a")), 0.0)
    end(state, "a-0", 1.0)
    assert one(state, sub("b-0", agent("b")), 29.0).stage
    assert len(state.programs.open) == 2
    one(state, sub("b-1", agent("b")), 40.0)
    assert [key[1] for key in state.programs.open] == ["b"]
    assert state.programs.counts.on_time == 1
    end(state, "b-0", 41.0)
    end(state, "b-1", 41.0)
    told = [fleet_status(state, now_s)["programs"]["open"] for now_s in (70.0, 72.0)]
    assert told == [1, 0], "the status says so where nobody asks for anything"


def test_calls_beyond_what_is_followed_are_requests_like_any(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as those of all users who send the same session id."""
    monkeypatch.setattr("controller.programs.open_program.MOST_NODES", 3)
    state = fleet(programs=ProgramOptions(idle_s=30.0))
    for k in range(5):
        decision = one(state, sub(f"a-{k}", agent("a")), float(k))
        assert (decision.verdict, decision.stage is not None) == (Verdict.ADMITTED, k < 3)
        end(state, f"a-{k}", k + 0.5)
    program = state.programs.open["", "a"]
    assert (len(program.parts), len(state.programs._keys), program.running) == (3, 3, 0)
    assert [state.programs.status(now_s)["open"] for now_s in (33.0, 35.0)] == [1, 0], "they say that it lives"
    state.check_integrity()


def test_a_program_that_cannot_end_in_time_is_told_so_at_its_first_request() -> None:
    state = fleet(unattainable="refuse")
    for k in range(20):
        play(state, f"p{k}", 100.0 * k)
    short = msgspec.structs.replace(agent("short"), deadline_s=1.5)
    decision = one(state, sub("short-0", short, slo=msgspec.structs.replace(OPEN, e2e_s=1.5)), 2500.0)
    assert (decision.verdict, decision.reason) == (Verdict.REFUSED, UNATTAINABLE)
    assert ("", "short") not in state.programs.open, "refused, it has not begun"
    assert state.programs.status(2500.0)["refused"] == 1


def test_a_new_kind_of_program_is_taken_to_have_ended_by_the_tool_times_of_those_under_way() -> None:
    """Eight of them made two rounds each, with two seconds of tools between, and say no more."""
    state = fleet()
    for k in range(8):
        play(state, f"p{k}", 10.0 * k, rounds=2, is_open=True)
    assert state.programs.places.tokens > 0.0
    one(state, sub("other-0", Program("other", DEADLINE_S, app="another")), 80.0)
    held = {key[1] for key, program in state.programs.open.items() if program.held_tokens > 0.0}
    assert held == {"p0", "p1", "p2", "other"}, "when theirs ended, too few tool times were known"


def test_a_later_round_of_a_promised_program_is_admitted_where_a_new_request_is_not() -> None:
    state = fleet()
    one(state, sub("p-0", agent()), 0.0)
    end(state, "p-0", 1.0)
    fill(state, 2.0)
    tight = msgspec.structs.replace(OPEN, ttft_s=0.05)
    assert one(state, sub("new", agent("new"), 4000, tight), 2.0, is_full=True).verdict == Verdict.REFUSED
    later = one(state, sub("p-1", agent(), 2000, tight), 2.0, is_full=True)
    assert (later.verdict, later.reason) == (Verdict.ADMITTED, "program_promised")
    assert math.isinf(later.predicted_ttft_s), "nobody has checked it: it counts as no promise of a request"
    state.check_integrity()


def test_precedence_ends_where_a_program_needs_more_than_it_was_expected_to() -> None:
    """Unknown, it was expected to have 4 * 500 prompt tokens; twice that may go before others."""
    state = fleet()
    one(state, sub("p-0", agent()), 0.0)
    end(state, "p-0", 1.0)
    fill(state, 2.0)
    tight = msgspec.structs.replace(OPEN, ttft_s=0.05)
    verdicts = [one(state, sub(f"p-{k}", agent(), 2000, tight), 2.0, is_full=True).verdict for k in range(1, 5)]
    assert verdicts == [Verdict.ADMITTED] * 2 + [Verdict.REFUSED] * 2


@pytest.mark.parametrize(("earlier", "adapter", "is_promised"), [(1, "", True), (0, "", False), (1, "lora", False)])
def test_what_a_replica_presumably_holds_counts_for_later_rounds_only(
    earlier: int, adapter: str, is_promised: bool
) -> None:
    """Not for the first round, whose prefix may be anybody's, nor where a held adapter is part of the preference."""
    state = fleet(prefix_affinity=1.0, block_tokens=32, programs=ProgramOptions(keeps_promises=False))
    marks = tuple(range(1, 126))
    told: dict[str, Any] = dict(prefix=marks, adapter=adapter)
    ran = sub("p-0", agent() if earlier else agent("other"), 4000, **told)
    assert one(state, ran, 0.0).verdict == Verdict.ADMITTED
    end(state, "p-0", 1.0)
    hasty = msgspec.structs.replace(OPEN, ttft_s=0.05)
    decision = one(state, sub("p-1", agent(), 4000, hasty, **told), 2.0)
    assert (decision.verdict == Verdict.ADMITTED) == is_promised


def test_precedence_can_be_off() -> None:
    state = fleet(programs=ProgramOptions(keeps_promises=False))
    one(state, sub("p-0", agent()), 0.0)
    end(state, "p-0", 1.0)
    fill(state, 2.0)
    tight = msgspec.structs.replace(OPEN, ttft_s=0.05)
    assert one(state, sub("p-1", agent(), 2000, tight), 2.0, is_full=True).verdict == Verdict.REFUSED


def test_a_program_that_went_best_effort_at_first_was_promised_nothing() -> None:
    state = fleet()
    slo = msgspec.structs.replace(OPEN, ttft_s=1e-4, tier="tight", is_tier_open=False)
    decision = one(state, sub("p-0", agent(), slo=slo), 0.0)
    assert decision.verdict == Verdict.BEST_EFFORT
    assert decision.stage
    assert not decision.stage.is_promised


def test_a_promise_outlives_the_controller() -> None:
    """A new controller learns age and promise from the ingress."""
    state = fleet()
    told = agent(age_s=12.0, is_promised=True)
    stage = one(state, sub("p-3", told), 1000.0).stage
    assert stage
    assert stage.is_promised
    assert stage.left_s == pytest.approx(8.0)


def test_asking_again_is_the_same_part_and_siblings_share_a_stage() -> None:
    state = fleet(pending=True)
    state.report(report("a"), 0.0)
    asks = [sub("p-0", agent(), age_s=0.0), sub("p-1", agent())]
    first, second = state.admit(asks, 0.0)
    (again,) = state.admit([msgspec.structs.replace(asks[0], request_id="p-0~1", age_s=0.5)], 0.5)
    assert first.stage
    assert again.stage == first.stage
    assert second.stage
    assert second.stage.stage == 1
    assert len(state.programs.open["", "p"].nodes) == 2


def test_programs_of_two_tenants_are_two_whatever_their_names() -> None:
    state = fleet()
    one(state, sub("a", agent(), tenant="x"), 0.0)
    stage = one(state, sub("b", agent(), tenant="y"), 5.0).stage
    assert stage
    assert (stage.stage, stage.left_s) == (1, DEADLINE_S)


def test_a_request_that_asks_for_best_effort_stays_so() -> None:
    state = fleet()
    decision = one(state, sub("a", agent(), slo=FLEX), 0.0)
    assert decision.verdict == Verdict.ADMITTED
    assert decision.reason == "best_effort"
    assert decision.stage
    assert not decision.stage.is_promised


def test_a_new_fleet_takes_programs_over() -> None:
    old = fleet()
    one(old, sub("p-0", agent()), 0.0)
    new = fleet()
    new.adopt_state(old, 1.0)
    end(new, "p-0", 1.0)
    stage = one(new, sub("p-1", agent()), 2.0).stage
    assert stage
    assert (stage.stage, stage.is_promised) == (2, True)
