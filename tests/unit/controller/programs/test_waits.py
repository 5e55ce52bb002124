"""Programs that are or may be promised wait for a place in the KV caches, as long as their deadlines let them."""

import msgspec
import numpy as np
import pytest

from controller.decisions import NO_PLACE
from controller.fleet import Fleet
from controller.programs.history import FEW_SCALES, PRIOR_SCALE, History
from controller.programs.open_program import OpenProgram
from controller.programs.options import ProgramOptions
from controller.programs.programs import LEFT_PACE
from protocol.messages import Decision, Slo, Verdict
from protocol.programs import Program
from tests.support.fleet_cases import fleet
from tests.unit.controller.programs.test_bound import call, end, one

LAX = Slo(e2e_s=1000.0, tier="tight", is_tier_open=True)
SMALL = 1000  # prompt tokens
UNBOUNDED = ProgramOptions(bounded=False)


@pytest.fixture
def full() -> Fleet:
    """A fleet whose KV caches a promised program fills, which is with its tools."""
    state = fleet(programs=UNBOUNDED)
    assert ask(state, "first", 0.0).verdict == Verdict.ADMITTED
    end(state, "first-0", 0.5)
    own = state.programs.open["", "first"]
    own.left = own.left._replace(context_tokens=400_000.0)
    state.programs.places.take(own)
    return state


def ask(state: Fleet, name: str, now_s: float, number: int = 0, slo: Slo = LAX) -> Decision:
    return one(state, call(name, number, SMALL, slo), now_s)


def test_a_newcomer_waits_for_a_place_and_is_promised_then(full: Fleet) -> None:
    known_scale(full, 8.0)
    told = ask(full, "second", 1.0)
    assert (told.verdict, told.reason) == (Verdict.PENDING, NO_PLACE)
    assert 0.0 < told.retry_after_s < 1.0
    full.programs._close(("", "first"), 1.5)
    told = ask(full, "second", 1.0 + told.retry_after_s + 0.5)
    assert told.verdict == Verdict.ADMITTED
    assert told.stage
    assert told.stage.is_promised
    assert full.programs.open["", "second"].held_tokens > 0.0
    assert full.programs.status(2.0)["waiting"] == 0
    full.check_integrity()


def test_whoever_waits_counts_among_the_promised(full: Fleet) -> None:
    known_scale(full, 8.0)
    ask(full, "second", 1.0)
    second = full.programs.open["", "second"]
    assert not second.is_promised
    assert second in full.programs.bound.promised
    full.programs._end_lost(second, 2.0)
    full.programs._close(("", "second"), 2.0)
    assert second not in full.programs.bound.promised


def test_whoever_waited_and_is_not_promised_counts_no_more(full: Fleet) -> None:
    known_scale(full, 8.0)
    ask(full, "second", 1.0)
    second = full.programs.open["", "second"]
    full.programs.told([Decision("second-0", Verdict.BEST_EFFORT, "a", "flex", "infeasible")], 2.0)
    assert not second.is_promised
    assert second not in full.programs.bound.promised


def test_nobody_waits_beyond_the_time_at_which_it_has_to_begin(full: Fleet) -> None:
    """Nothing is known of the application: what may follow takes as long as ``PRIOR_SCALE`` lets it."""
    latest_s = 1.0 + 1000.0 * (1.0 - LEFT_PACE / PRIOR_SCALE)
    assert latest_s == pytest.approx(1.0)
    assert ask(full, "unknown", 1.0).verdict == Verdict.ADMITTED


@pytest.mark.parametrize(("at_s", "verdict"), [(25.0, Verdict.PENDING), (27.0, Verdict.ADMITTED)])
def test_what_deadlines_are_usually_worth_says_when_that_is(full: Fleet, at_s: float, verdict: Verdict) -> None:
    """A quarter of 100 s: what follows may take 25 s on idle engines, and is given three times as long."""
    known_scale(full, 4.0)
    due = msgspec.structs.replace(LAX, e2e_s=100.0)
    assert ask(full, "second", 1.0, slo=due).verdict == Verdict.PENDING
    assert ask(full, "second", at_s, slo=due).verdict == verdict


def known_scale(state: Fleet, scale: float) -> None:
    history = state.programs._history("", "a")
    history.scales.clear()
    for _ in range(FEW_SCALES):
        history.note_scale(scale)


@pytest.mark.parametrize("own", [{"ttft_s": 5.0, "tpot_s": 1.0}, {"e2e_s": 20.0}])
def test_a_call_that_asks_for_more_than_its_program_does_not_wait(full: Fleet, own: dict[str, float]) -> None:
    known_scale(full, 8.0)
    assert ask(full, "second", 1.0).verdict == Verdict.PENDING
    third = call("third", 0, SMALL, LAX)
    hurried = msgspec.structs.replace(third, slo=msgspec.structs.replace(LAX, **own))
    assert one(full, hurried, 1.0).verdict == Verdict.ADMITTED


def test_what_has_begun_goes_on(full: Fleet) -> None:
    known_scale(full, 8.0)
    assert ask(full, "second", 1.0).verdict == Verdict.PENDING
    begun = msgspec.structs.replace(call("third", 0, SMALL, LAX), emitted_tokens=7)
    assert one(full, begun, 1.0).reason != NO_PLACE


def test_a_program_with_a_place_does_not_wait_with_its_next_call(full: Fleet) -> None:
    known_scale(full, 8.0)
    assert ask(full, "first", 1.0, 1).verdict == Verdict.ADMITTED


def test_a_promised_program_that_seemed_to_have_ended_waits_for_a_new_place(full: Fleet) -> None:
    known_scale(full, 8.0)
    assert ask(full, "second", 1.0).verdict == Verdict.PENDING
    first = full.programs.open["", "first"]
    full.programs._set_aside(first)
    assert ask(full, "second", 2.0).verdict == Verdict.ADMITTED
    second = full.programs.open["", "second"]
    second.left = second.left._replace(context_tokens=399_500.0)
    full.programs.places.take(second)
    assert ask(full, "first", 3.0, 1).reason == NO_PLACE
    assert first.is_promised


def test_without_places_or_admission_nobody_waits() -> None:
    for state in (fleet(programs=ProgramOptions(bounded=False, has_places=False)), fleet(admission=False)):
        ask(state, "first", 0.0)
        known_scale(state, 8.0)
        state.programs.places.tokens = 1e9
        assert ask(state, "second", 1.0).verdict == Verdict.ADMITTED


def test_work_that_is_done_and_time_with_tools_leave_less(full: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    known_scale(full, 4.0)
    due = msgspec.structs.replace(LAX, e2e_s=100.0)
    ask(full, "second", 0.0, slo=due)
    own, request = full.programs.open["", "second"], call("second", 0, SMALL, due)
    monkeypatch.setattr(full.programs, "idle_s", lambda program, now_s: 5.0)
    monkeypatch.setattr(OpenProgram, "gaps_s", lambda self: 30.0)
    own.left = own.left._replace(idle_s=0.0, gaps_s=10.0)
    idle_s = (100.0 - 30.0 - 10.0) / 4.0 - 5.0
    assert full.programs._latest_start_s(own, request, 0.0) == pytest.approx(100.0 - LEFT_PACE * idle_s - 10.0)


def test_programs_that_end_tell_their_scale(full: Fleet) -> None:
    scales = full.programs._history("", "a").scales
    own = full.programs.open["", "first"]
    idle_s = full.programs.idle_s(own, 1.0)
    assert idle_s > 0.0
    full.programs._close(("", "first"), 1.0)
    assert list(scales) == [pytest.approx(1000.0 / idle_s)]


def test_the_tight_ones_of_known_deadlines_count() -> None:
    history = History()
    assert history.least_scale() == PRIOR_SCALE
    for scale in np.linspace(2.0, 12.0, 11):
        history.note_scale(float(scale))
    assert history.least_scale() == pytest.approx(3.0)
    for _ in range(200):
        history.note_scale(0.1)
    assert history.least_scale() == 1.0, "nothing is faster than an idle engine"


def test_the_scale_of_a_deadline_leaves_tools_out() -> None:
    own = OpenProgram(0.0, 100.0, "a")
    for number, (begin_s, end_s) in enumerate([(0.0, 10.0), (40.0, 50.0)]):  # 30 s of tools
        own.arrive(f"p-{number}", Program("p"), SMALL, begin_s)
        own.nodes["end_s"][number] = end_s
    assert own.scale(10.0) == pytest.approx(7.0)
