"""Promised programs with a call that we refuse: their promise is broken, unless the call is served after all."""

import msgspec
import pytest

from controller.fleet import Fleet
from controller.programs.bound import ProgramBound
from controller.programs.open_program import OpenProgram
from protocol.messages import Decision, Verdict
from tests.support.fleet_cases import fleet
from tests.unit.controller.programs.test_bound import scale
from tests.unit.controller.programs.test_programs import DEADLINE_S, agent, end, fill, one, sub
from tests.unit.controller.programs.test_unserved_calls import HASTY, begun, refused


def ended(state: Fleet, now_s: float) -> tuple[int, int, int, int]:
    """Programs on time, failed, promised and kept, once those that say nothing have ended."""
    told = state.programs.status(now_s + state.options.programs.idle_s)
    assert told["open"] == 0
    return told["on_time"], told["failed"], told["promised"], told["kept"]


def test_a_promise_is_broken_by_a_call_that_is_refused() -> None:
    state = begun()
    assert state.programs.open["", "p"].is_promised
    refused(state, "p-1", 3.0)
    assert ended(state, 3.0) == (0, 1, 1, 0)
    assert state.programs.counts.status()["kept_share"] == 0.0
    assert scale(state.programs.bound) < 1.0


def test_a_client_that_leaves_breaks_no_promise() -> None:
    state = begun()
    state.programs.give_stages([sub("p-1", agent(), 4000)], 3.0)
    end(state, "p-1", 4.0, "abort", 0)
    assert ended(state, 4.0) == (0, 1, 0, 0)
    assert scale(state.programs.bound) == 1.0


def test_a_promise_is_kept_where_a_call_that_was_refused_is_served_in_time() -> None:
    state = begun()
    refused(state, "p-1", 3.0)
    one(state, sub("p-2", agent(is_last=True), 4000), 10.0)
    end(state, "p-2", 11.0)
    assert ended(state, 11.0) == (1, 0, 1, 1)


@pytest.mark.parametrize("is_last", [False, True])
def test_a_sibling_that_ends_does_not_make_up_for_a_call_that_was_refused(is_last: bool) -> None:
    state = begun()
    assert one(state, sub("p-1", agent(is_last=is_last), 500), 5.0).verdict == Verdict.ADMITTED
    fill(state, 5.0)
    refused(state, "p-2", 5.5)
    end(state, "p-1", 6.0)
    assert ("", "p") in state.programs.open, "it may ask again"
    assert ended(state, 6.0) == (0, 1, 1, 0)


def test_what_an_earlier_controller_promised_is_broken_by_a_refusal_here() -> None:
    state = fleet()
    fill(state, 0.0)
    told = agent(is_promised=True, age_s=2.0)
    assert one(state, sub("p-1", told, 4000, HASTY), 0.5, is_full=True).verdict == Verdict.REFUSED
    assert (*ended(state, 0.5), state.programs.counts.refused) == (0, 1, 1, 0, 0)


def test_a_call_that_lost_its_place_and_is_refused_another_breaks_the_promise() -> None:
    state = begun()
    request = sub("p-1", agent(), 500)
    assert one(state, request, 5.0).verdict == Verdict.ADMITTED
    state.programs.give_stages([msgspec.structs.replace(request, request_id="p-1~1")], 6.0)
    state.programs.told([Decision("p-1~1", Verdict.REFUSED, "", "loose", "no_replica")], 6.0)
    end(state, "p-1~1", 6.1, "refused", 0)
    assert len(state.programs.open["", "p"].nodes) == 1
    assert ended(state, 6.1) == (0, 1, 1, 0)


def test_a_stream_that_finds_no_other_replica_breaks_the_promise() -> None:
    state = begun()
    request = sub("p-1", agent(), 500)
    assert one(state, request, 5.0).verdict == Verdict.ADMITTED
    moved = msgspec.structs.replace(request, request_id="p-1~1", emitted_tokens=5)
    state.programs.give_stages([moved], 6.0)
    state.programs.told([Decision("p-1~1", Verdict.REFUSED, "", "loose", "no_replica")], 6.0)
    end(state, "p-1~1", 8.0, "error", 5)
    assert state.programs.open["", "p"].nodes["output_tokens"].tolist() == [100, 5]
    assert ended(state, 8.0) == (0, 1, 1, 0)


def test_a_promise_is_kept_where_the_ingress_has_a_stream_served_that_we_refused() -> None:
    """There was no replica; then the ingress found one while the controller was away."""
    state = begun()
    request = sub("p-1", agent(is_last=True), 500)
    assert one(state, request, 5.0).verdict == Verdict.ADMITTED
    moved = msgspec.structs.replace(request, request_id="p-1~1", emitted_tokens=5)
    state.programs.give_stages([moved], 6.0)
    state.programs.told([Decision("p-1~1", Verdict.REFUSED, "", "loose", "no_replica")], 6.0)
    end(state, "p-1~2", 8.0)
    assert state.programs.counts.status()["kept_share"] == 1.0
    assert ended(state, 8.0) == (1, 0, 1, 1)


def test_a_call_is_refused_with_all_its_sequences() -> None:
    """One of them had a place already."""
    state = begun()
    assert one(state, sub("p-1", agent(), 500), 5.0).verdict == Verdict.ADMITTED
    fill(state, 5.0)
    refused(state, "p-2", 5.5)
    end(state, "p-1", 5.6, "refused", 0)
    assert len(state.programs.open["", "p"].nodes) == 1
    assert ended(state, 5.6) == (0, 1, 1, 0)


def test_the_bound_hears_of_it_at_the_deadline() -> None:
    bound = ProgramBound(fleet().slots)
    bound.note(OpenProgram(0.0, DEADLINE_S, "a", is_promised=True, is_refused=True))
    bound.note_late(DEADLINE_S - 1.0)
    assert scale(bound) == 1.0
    bound.note_late(DEADLINE_S)
    assert scale(bound) < 1.0
