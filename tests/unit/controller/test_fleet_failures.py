"""What the fleet makes of replicas that fail and of messages that are lost."""

from typing import Any

import msgspec
import pytest

from controller.mirror.slots import DOUBT_S
from controller.scaling.allocation import AllocationOptions
from controller.status import fleet_status
from controller.unplaced import NEWS_S
from profiles.profile import ProfileError
from protocol.messages import Progress, Slo, Step, Verdict
from tests.support.fleet_cases import FLEX, LOOSE, TIGHT, ask, ended, fleet, in_progress, report


def test_a_replica_that_an_ingress_saw_fail_takes_nothing_until_its_engine_goes_on() -> None:
    """It reports all the while: only an iteration that began since then, or none in flight, says that it lives."""
    state = fleet()
    for name in "ab":
        state.report(report(name), 9.0)
    state.on_failed("a", 10.0)
    for sequence, now_s in enumerate((10.2, 11.7, 15.0, 20.0), start=2):
        state.report(report("a", sequence, age_s=now_s - 0.1), now_s)
        state.report(report("b", sequence), now_s)
        assert {state.admit([ask(TIGHT)], now_s)[0].replica for _ in range(4)} == {"b"}, now_s
        assert not fleet_status(state, now_s)["replicas"][0]["live"]
    state.on_removed("b", 20.0)
    assert state.admit([ask(TIGHT)], 20.1)[0].reason == "no_replica", "not even as the only one"
    state.report(report("a", 9, age_s=2.0), 21.0)
    assert state.admit([ask(TIGHT)], 21.1)[0].replica == "a", "one long iteration, but a new one"
    state.on_failed("a", 22.0)
    state.report(report("a", 10), 24.0)
    assert state.admit([ask(TIGHT)], 24.1)[0].replica == "a", "idle"


@pytest.mark.parametrize("slo", [TIGHT, LOOSE, FLEX])
@pytest.mark.parametrize("is_alive", [True, False])
def test_while_all_that_report_were_seen_to_fail_requests_wait_for_a_sign_of_life(slo: Slo, is_alive: bool) -> None:
    """One ingress has lost its connections, or all engines stand still."""
    state, asked, now_s = fleet(), ask(slo), 0.1
    for name in "ab":
        state.report(report(name), 0.0)
        state.on_failed(name, 0.1)
    (decision,) = state.admit([asked], now_s)
    while decision.verdict == Verdict.PENDING:
        assert (decision.reason, decision.retry_after_s) == ("no_replica", 0.25)
        now_s += decision.retry_after_s
        for name in "ab":
            state.report(report(name, int(now_s * 100), age_s=0.0 if is_alive else now_s), now_s)
        (decision,) = state.admit([msgspec.structs.replace(asked, age_s=now_s - 0.1)], now_s)
    assert bool(decision.replica) == is_alive
    assert now_s <= 0.1 + (DOUBT_S + 0.5 if is_alive else NEWS_S + 0.25)
    state.report(report("a", 1000), now_s + 3.0 * NEWS_S)
    assert not state.unplaced._doubted_s


def test_the_last_words_of_a_failed_replica_do_not_clear_it() -> None:
    state = fleet()
    for name in "ab":
        state.report(report(name), 0.0)
    state.on_failed("a", 1.0)
    state.report(report("a", 2), 1.1)
    assert {state.admit([ask(TIGHT)], 1.2)[0].replica for _ in range(4)} == {"b"}


def test_a_long_iteration_alone_is_no_failure_and_nothing_is_imagined_after_it() -> None:
    state = fleet()
    held = (Progress("long", FLEX, 12.0, 100, 100, 1, 3000, 4000, True),)
    state.report(report("a", 1, held, age_s=12.0), 20.0)
    assert state.admit([ask(TIGHT)], 20.0)[0].replica == "a"
    assert 1 < state.replicas["a"].table["emitted_tokens"][0] < 500, "1.5 of the 12 seconds, 3 ms each at least"


def test_a_request_that_its_ingress_sent_elsewhere_is_seen_where_it_is() -> None:
    """The ingress did not hear the decision in time and chose by itself."""
    state, asked = fleet(), ask(TIGHT)
    for name in "ab":
        state.report(report(name), 0.0)
    decided = state.admit([asked], 0.0)[0].replica
    other = "ab".replace(decided, "")
    state.report(report(other, 2, in_progress(asked)), 0.5)
    assert len(state.replicas[other].table) == 0, "a stream that moved: the decision is newer than the report"
    state.report(report(other, 3, in_progress(asked)), 4.0)
    assert [len(state.replicas[name].table) for name in (decided, other)] == [0, 1]
    state.report(report(decided, 2), 4.1)
    state.report(report(other, 4, in_progress(asked)), 4.2)
    assert len(state.replicas[other].table) == 1
    state.check_integrity()


def test_a_lost_reservation_leaves_no_trace() -> None:
    state, asked = fleet(), ask(TIGHT)
    state.report(report("a"), 0.0)
    state.admit([asked], 0.0)
    state.report(report("a", 2), 10.0)
    state.report(report("b", 1, in_progress(asked)), 10.0)
    assert len(state.replicas["b"].table) == 1
    state.check_integrity()


def test_requests_of_an_ingress_that_died_are_forgotten_once_their_replica_has_ended_them() -> None:
    state, asked, whole = fleet(), ask(TIGHT), ask(TIGHT)
    state.report(report("a"), 0.0)
    state.admit([asked, whole], 0.0)
    state.report(report("a", 2, in_progress(asked), finished=((whole.request_id, 3),)), 0.2)
    state.report(report("a", 3), 0.4)
    state.check_integrity()
    state.report(report("b", 1, in_progress(asked)), 0.5)
    assert len(state.replicas["b"].table) == 1
    state.report(report("b", 1, incarnation="2"), 0.6)
    state.check_integrity()


def test_a_frozen_engine_gets_nothing_new_within_about_a_second() -> None:
    """It went on getting requests for 10.6 s, because its replica reported on."""
    served = fleet()
    for name in "ab":
        served.report(report(name), 0.0)
    served.report(report("a", 2, age_s=1.1), 1.2)
    served.report(report("b", 2), 1.2)
    assert {served.admit([ask(TIGHT)], 1.2)[0].replica for _ in range(4)} == {"b"}
    served.report(report("a", 3), 1.4)
    assert "a" in {replica.name for replica in served.live(1.4)}, "it moves again"


def test_an_iteration_that_is_long_among_long_ones_is_no_standstill() -> None:
    served = fleet()
    slow = Step(1.0, 0.0, 0.0, 1.0, 0.0, 0.5)
    for name in "ab":
        served.report(report(name, steps=(slow,)), 0.0)
    served.report(report("a", 2, age_s=1.1), 1.2)
    assert {replica.name for replica in served.live(1.2)} == {"a", "b"}


def test_where_all_engines_stand_still_they_are_still_used() -> None:
    served = fleet()
    served.report(report("a", age_s=5.0), 0.0)
    assert served.admit([ask(TIGHT)], 0.0)[0].replica == "a"


def test_best_effort_waits_for_a_place_where_it_may_run() -> None:
    """Another replica has free places, but has failed the request: that is no reason to say that none is alive."""
    state = fleet(best_effort_backlog=1.0)
    for name in "ab":
        state.report(msgspec.structs.replace(report(name), max_running=2), 0.0)
    held = [ask(FLEX, 100) for _ in range(4)]
    where = {request.request_id: state.admit([request], 0.0)[0].replica for request in held}
    for request in held:
        if where[request.request_id] == "a":
            state.on_outcome(ended(request, "stop", 5), 0.1)
    assert state.admit([ask(FLEX, 100)], 0.2)[0].replica == "a"
    decision = state.admit([ask(FLEX, 100, exclude=("a",))], 0.2)[0]
    assert decision.verdict == Verdict.PENDING
    assert decision.retry_after_s > 0.0


@pytest.mark.parametrize("wrong", [{"profile": "no such profile"}, {"kv_capacity_tokens": -1}])
def test_a_report_that_makes_no_sense_costs_no_replica_its_slot(wrong: dict[str, Any]) -> None:
    state = fleet()
    for name in "ab":
        state.report(report(name), 0.0)
    free = list(state.slots._free)
    for born in (report("a", incarnation="2"), report("c"), report("a", incarnation="2")):
        with pytest.raises((ProfileError, ValueError)):
            state.report(msgspec.structs.replace(born, **wrong), 0.1)
    assert state.slots._free == free
    assert sorted(state.by_slot) == [0, 1]
    state.report(report("a", incarnation="2"), 0.2)
    assert {replica.slot for replica in state.replicas.values()} == {0, 1}
    state.check_integrity()


@pytest.mark.parametrize("roles", ["static", "dynamic"])
def test_the_history_tells_which_replicas_died_left_and_were_handed_over(roles: str) -> None:
    state = fleet(allocation=AllocationOptions(roles))
    for name in "abcde":
        state.report(report(name, draining=name == "c"), 0.0)
    told = len(state.allocation.history)
    state.report(report("a", incarnation="2"), 1.0)
    silent_s = state.options.forget_s + 1.0
    for sequence, now_s in enumerate((0.5 * silent_s, silent_s), start=2):
        for name in "de":
            state.report(report(name, sequence), now_s)
        state.report(report("a", sequence, incarnation="2"), now_s)
    state.on_removed("d", silent_s)
    state.hand_over("e", silent_s)
    changes = {c.what: (c.after == "absent", c.reason) for c in list(state.allocation.history)[told:]}
    died, left = (False, "died and started again"), (True, "left")
    ended, handed = (True, "drained and ended"), (True, "another controller has it")
    assert changes == {"a": died, "b": (True, "stopped reporting"), "c": left, "d": ended, "e": handed}
