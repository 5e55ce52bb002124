"""A fault in the decision about one request."""

import logging
from collections.abc import Callable

import msgspec
import pytest

from controller.actor import Controller
from controller.faults import admit_each, note_each
from controller.fleet import Fleet
from controller.placement import Pending
from protocol.messages import AdmissionRequest, Decision, Outcome, Verdict
from tests.support.fleet_cases import TIGHT, ask, ended, fleet, group, report
from tests.unit.controller.test_actor import run


def poisoned(state: Fleet, method: str, *poison: AdmissionRequest) -> Fleet:
    """This method raises for these requests, which have a row in a mirror by then."""
    sound: Callable[..., Decision] = getattr(state, method)
    names = {request.request_id for request in poison}

    def fails(p: Pending, *more: object) -> Decision:
        if p.request.request_id in names:
            raise ZeroDivisionError("a fault of ours")
        return sound(p, *more)

    setattr(state, method, fails)
    return state


def test_the_others_of_its_batch_are_decided_as_if_it_had_not_been_there(caplog: pytest.LogCaptureFixture) -> None:
    asked = [ask(TIGHT) for _ in range(4)]
    state = poisoned(fleet(), "_admit_or_hold", asked[2])
    for name in "ab":
        state.report(report(name), 0.0)
    with caplog.at_level(logging.ERROR, "polyslo.controller"):
        decided = admit_each(state, asked, 0.0, "")
    assert [d.request_id for d in decided] == [a.request_id for a in asked]
    assert [d.verdict for d in decided] == [Verdict.ADMITTED, Verdict.ADMITTED, Verdict.UNCHECKED, Verdict.ADMITTED]
    assert (decided[2].replica, decided[2].reason) == ("", "controller_error"), "its ingress is to choose"
    assert asked[2].request_id in caplog.text
    assert "ZeroDivisionError" in caplog.text
    assert sum(len(replica.table) for replica in state.replicas.values()) == 3
    state.check_integrity()


def test_sequences_of_one_request_share_its_fate() -> None:
    together, alone = group(TIGHT, 3), ask(TIGHT)
    state = poisoned(fleet(), "_settle", together[1])
    state.report(report("a"), 0.0)
    decided = admit_each(state, [*together, alone], 0.0, "")
    assert [d.verdict for d in decided] == [Verdict.UNCHECKED] * 3 + [Verdict.ADMITTED]
    assert len(state.replicas["a"].table) == 1
    state.check_integrity()


def test_a_request_that_failed_has_no_place_left_when_it_asks_again() -> None:
    state, asked = fleet(), ask(TIGHT)
    state.report(report("a"), 0.0)
    assert admit_each(state, [asked], 0.0, "")[0].verdict == Verdict.ADMITTED
    sound = state.admit
    poisoned(state, "_admit_or_hold", asked)
    assert admit_each(state, [asked], 0.1, "")[0].verdict == Verdict.UNCHECKED
    assert len(state.replicas["a"].table) == 0
    state.check_integrity()
    assert sound([ask(TIGHT)], 0.2)[0].verdict == Verdict.ADMITTED


def test_the_other_outcomes_of_a_message_are_heard_and_all_places_are_free(caplog: pytest.LogCaptureFixture) -> None:
    state, asked = fleet(), [ask(TIGHT) for _ in range(3)]
    state.report(report("a"), 0.0)
    admit_each(state, asked, 0.0, "")
    heard, sound = list[str](), state.tracker.note

    def fails(outcome: Outcome, now_s: float) -> None:
        if outcome.request_id == asked[1].request_id:
            raise ZeroDivisionError("a fault of ours")
        heard.append(outcome.request_id)
        sound(outcome, now_s)

    state.tracker.note = fails  # type: ignore[method-assign]
    with caplog.at_level(logging.ERROR, "polyslo.controller"):
        note_each(state, [ended(each, "stop", 20) for each in asked], 1.0)
    assert heard == [asked[0].request_id, asked[2].request_id]
    assert asked[1].request_id in caplog.text
    assert not state.places
    state.check_integrity()


def test_an_outcome_that_fails_loses_no_other_of_its_message(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(controller: Controller) -> None:
        controller.fleet, heard = fleet(), list[str]()
        monkeypatch.setattr(controller.fleet, "on_outcome", lambda o, _: heard.append({"y": "y"}[o.request_id]))
        told = [ended(msgspec.structs.replace(ask(TIGHT), request_id=name), "stop") for name in "xy"]
        await controller.on_outcomes(msgspec.msgpack.encode(told))
        assert heard == ["y"]

    run(scenario, monkeypatch)
