"""Room for decodes: reserved while a prompt is computed, and looked for at the hand-over."""

import msgspec

from controller.decode_room import GRACE_S
from controller.disaggregation import HAND_OVER_S, DisaggregatedFleet
from controller.virtual import RESERVED_S
from controller.wire import Progress, Slo, Verdict, request_uid
from tests.disaggregated_cases import fleet, full, one, second
from tests.fleet_cases import FLEX, LOOSE, TIGHT, ask, ended, in_progress, report


def test_what_is_prefilled_waits_for_kv_room_and_keeps_its_class_when_that_is_late() -> None:
    state = fleet("pqd")
    asked = ask(TIGHT, 9000)
    assert one(state, asked).prefill_only
    full(state, "d", 0.1)
    decision = one(state, second(asked), 0.1)
    assert (decision.verdict, decision.replica) == (Verdict.PENDING, "")
    state.report(report("d", 300), 0.2)
    decision = one(state, second(asked), 0.2)
    assert (decision.verdict, decision.replica) == (Verdict.ADMITTED, "d")


def test_it_does_not_wait_for_kv_room_for_ever() -> None:
    state = fleet("pqd", silent_s=100.0)
    asked = ask(TIGHT, 9000)
    one(state, asked)
    full(state, "d", 0.1)
    answers = []
    for tick in range(1 + int(HAND_OVER_S)):
        full(state, "d", 0.1 + tick)
        answers.append(one(state, second(asked), 0.1 + tick))
    assert {answer.verdict for answer in answers[:-1]} == {Verdict.PENDING}
    assert (answers[-1].verdict, answers[-1].replica) == (Verdict.ADMITTED, "d")
    assert answers[-1].reason != "attainable"
    assert not state.replicas["d"].table["best_effort"].any()


def test_what_comes_too_late_for_its_line_goes_where_its_kv_cache_fits() -> None:
    """The idlest replica by work is the one whose cache is taken; a busier one has room."""
    state = fleet("pde", 1)
    asked = ask(TIGHT, 9000)
    one(state, asked)
    full(state, "d", 0.1)
    prompts = tuple(Progress(f"w{i}", TIGHT, 0.1, 8000, 0, 0, 100, 200, False) for i in range(9))
    state.report(report("e", 2, prompts), 0.1)
    decision = one(state, msgspec.structs.replace(second(asked), age_s=9.0), 0.1)
    assert (decision.verdict, decision.replica) == (Verdict.ADMITTED, "e")


def nearly_full(state: DisaggregatedFleet, name: str, now_s: float = 0.0) -> None:
    """A replica with KV room for one prompt of 9,000 tokens, not for two."""
    busy = tuple(Progress(f"{name}{i}", TIGHT, 1.0, 7000, 7100, 101, 150, 200, True) for i in range(54))
    state.report(report(name, int(now_s * 1000) + 2, busy), now_s)


def test_a_burst_does_not_see_the_same_room_twice() -> None:
    state = fleet("pqd")
    nearly_full(state, "d")
    burst = [ask(LOOSE, 9000) for _ in range(4)]
    decisions = state.admit(burst, 0.0)
    assert [d.prefill_only for d in decisions].count(True) == 1
    assert not any(d.prefill_only for d in state.admit([ask(LOOSE, 9000)], 0.01)), "nor a request after it"
    state.check_integrity()
    assert len(state.replicas["d"].table) == 54, "a reservation is no request"


def test_whoever_has_reserved_finds_room_though_others_decode_there_meanwhile() -> None:
    state = fleet("pqd")
    nearly_full(state, "d")
    asked = ask(LOOSE, 9000)
    assert one(state, asked).prefill_only
    whole, then = state.admit([ask(LOOSE, 9000, movable=False), second(asked)], 0.1)
    assert (then.verdict, then.replica, then.reason) == (Verdict.ADMITTED, "d", "attainable")
    assert whole.replica == ""
    assert state.room.held == {}


def test_room_is_given_back_at_an_end_and_after_a_bounded_time() -> None:
    for gives_back in ("end", "time", "failure"):
        state = fleet("pqd", silent_s=100.0)
        nearly_full(state, "d")
        asked, now_s = ask(LOOSE, 9000), 0.1
        assert one(state, asked).prefill_only
        if gives_back == "end":
            state.note_outcome(ended(asked, "abort"), 0.1)
        elif gives_back == "time":
            now_s = RESERVED_S + GRACE_S + 0.1
            for name in "pq":
                state.report(report(name, 9000), RESERVED_S + 0.05)
            nearly_full(state, "d", now_s)
        else:
            state.report(report("d", birth="2"), 0.1)
            assert state.room.held == {}
            continue
        assert one(state, ask(LOOSE, 9000), now_s).prefill_only, gives_back


def test_a_prompt_that_is_computed_for_long_keeps_its_room() -> None:
    state = fleet("pqd", silent_s=100.0)
    nearly_full(state, "d")
    asked = ask(LOOSE, 9000)
    where = one(state, asked).replica
    for tick in range(1, 20):
        state.report(report(where, tick + 1, in_progress(asked)), tick * 0.5)
        state.admit([], tick * 0.5)
    assert list(state.room.held) == [request_uid(asked.request_id)]


def test_what_is_not_prefilled_reserves_nothing() -> None:
    state = fleet("pd", 1)
    late = ask(Slo(0.001, 0.1, tier="loose"), 9000)
    assert not one(state, late).prefill_only
    one(state, ask(FLEX, 500))
    assert state.room.held == {}
