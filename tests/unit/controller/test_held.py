"""Requests that have a place and wait for their turn at their ingress."""

import msgspec
import numpy as np
import pytest

import controller.held
from controller import placement
from controller.fleet import Fleet
from controller.mirror.replica_model import RESERVED_S
from controller.options import DP, FleetOptions
from controller.scaling.tiers import Tier, TierTable
from controller.status import fleet_status
from profiles.store import load_profile
from protocol.messages import AdmissionRequest, Decision, Slo, Verdict, request_uid
from tests.support.fleet_cases import ask, ended, report

LONG, SHORT = 8000, 2000
LOOSE = Slo(3.0, 0.1, tier="loose")


def fleet(pending: bool, selection: str = DP) -> Fleet:
    tiers = TierTable.of(1, [Tier("loose", 3.0, 0.1), Tier("flex", best_effort=True)])
    return Fleet(FleetOptions(length_prior_tokens=100.0, pending=pending, selection=selection), tiers, load_profile)


def full(count: int = 30) -> tuple[Fleet, list[AdmissionRequest], list[Decision]]:
    """One replica and more long prompts at once than it can serve in time."""
    state, asks = fleet(pending=True), [ask(LOOSE, LONG) for _ in range(count)]
    state.report(report("a"), 0.0)
    return state, asks, state.admit(asks, 0.0)


def held(state: Fleet, asks: list[AdmissionRequest]) -> list[AdmissionRequest]:
    return [each for each in asks if request_uid(each.request_id) in state.held]


def aged(asked: AdmissionRequest, now_s: float) -> AdmissionRequest:
    return msgspec.structs.replace(asked, age_s=now_s)


def test_what_could_not_begin_yet_is_asked_to_come_again_and_has_its_place() -> None:
    state, asks, decisions = full()
    kept_back, sent = held(state, asks), [d for d in decisions if d.verdict == Verdict.ADMITTED]
    assert sent
    assert len(kept_back) > 2
    (replica,) = state.replicas.values()
    assert len(replica.table) == len(sent) + len(kept_back)
    told = {d.request_id: d for d in decisions}
    for each in kept_back:
        decision = told[each.request_id]
        assert (decision.verdict, decision.replica) == (Verdict.PENDING, "")
        assert 0.0 < decision.retry_after_s <= 0.25
    assert fleet_status(state, 0.0)["waiting"]["loose"] >= len(kept_back)
    state.check_integrity()


def test_it_is_sent_when_its_turn_comes() -> None:
    state, asks, _ = full()
    first = held(state, asks)[0]
    for each in asks:
        if each is not first:
            state.on_outcome(ended(each, "abort"), 0.1)
    state.report(report("a", 2), 0.1)
    (decision,) = state.admit([aged(first, 0.1)], 0.1)
    assert (decision.verdict, decision.replica) == (Verdict.ADMITTED, "a")
    assert request_uid(first.request_id) not in state.held
    state.check_integrity()


def test_those_held_are_sent_to_an_idle_engine_however_often_it_reports() -> None:
    """None of them is there yet: a mirror that ran them would be busy, and each would wait for the others."""
    state, asks, decisions = full()
    waiting = {each.request_id: each for each in held(state, asks)}
    for each in asks:
        if each.request_id not in waiting:
            state.on_outcome(ended(each, "abort"), 0.0)
    again_s = {d.request_id: d.retry_after_s for d in decisions if d.request_id in waiting}
    for k in range(1, 50):
        state.report(report("a", 1 + k), 0.02 * k)
        now_s = 0.02 * k + 0.01
        due = [waiting[uid] for uid, at_s in again_s.items() if at_s <= now_s]
        decisions = state.admit([aged(each, now_s) for each in due], now_s)
        if Verdict.ADMITTED in {d.verdict for d in decisions}:
            assert now_s < 0.15
            return
        again_s |= {d.request_id: now_s + d.retry_after_s for d in decisions}
    raise AssertionError("an idle engine, and all are held")


def test_shorter_prompts_take_the_places_of_longer_ones_that_have_not_begun() -> None:
    state, asks, _ = full()
    before = len(held(state, asks))
    shorter = [ask(LOOSE, SHORT) for _ in range(20)]
    state.admit(shorter, 0.0)
    assert len(held(state, asks)) < before - 1
    assert len(held(state, shorter)) > before - len(held(state, asks))
    state.check_integrity()


def test_who_was_sent_keeps_its_place() -> None:
    """Without waiting every placed request is sent at once: nobody has to make way."""
    state, asks = fleet(pending=False), [ask(LOOSE, LONG) for _ in range(30)]
    state.report(report("a"), 0.0)
    sent = [d for d in state.admit(asks, 0.0) if d.verdict == Verdict.ADMITTED]
    state.admit([ask(LOOSE, SHORT)], 0.0)
    (replica,) = state.replicas.values()
    assert {request_uid(d.request_id) for d in sent} <= set(replica.table["id"].tolist())


def test_a_place_that_nobody_asks_for_any_more_is_free_again() -> None:
    state, asks, _ = full()
    first = held(state, asks)[0]
    state.on_outcome(ended(first, "abort"), 0.1)
    assert request_uid(first.request_id) not in state.held
    state.report(report("a", 2), RESERVED_S + 0.1)
    state.report(report("a", 3), RESERVED_S + 0.2)
    assert not held(state, asks)
    (replica,) = state.replicas.values()
    assert len(replica.table) == 0
    state.check_integrity()


def test_a_replica_that_is_gone_holds_nothing() -> None:
    state, asks, _ = full()
    state.report(report("a", 1, incarnation="2"), 0.1)
    assert not held(state, asks)
    state.admit([ask(LOOSE, SHORT)], 0.1)
    state.check_integrity()


def test_an_engine_that_forms_iterations_ahead_gets_what_it_will_need_earlier() -> None:
    """By as long as one of its iterations takes; it would begin one iteration too late otherwise."""
    counts = []
    asks = [msgspec.structs.replace(ask(LOOSE, LONG), request_id=f"r{i}") for i in range(30)]  # ids say who is first
    for steps in (1, 2):
        state = fleet(pending=True)
        state.report(msgspec.structs.replace(report("a"), steps_in_flight=steps, max_iteration_s=0.5), 0.0)
        decisions = state.admit(asks, 0.0)
        counts.append((len(held(state, asks)), sum(d.verdict == Verdict.ADMITTED for d in decisions)))
    (first, sent), (fewer, more) = counts
    assert 0 < fewer < first
    assert more - sent == first - fewer


def test_who_is_not_as_likely_in_time_as_asked_for_takes_no_place_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    state, asks, _ = full()
    before = len(held(state, asks))
    monkeypatch.setattr(controller.held, "plan_chances", lambda *_: np.full(1, 0.4))
    shorter = [ask(LOOSE, SHORT) for _ in range(20)]
    state.admit(shorter, 0.0)
    assert (len(held(state, asks)), len(held(state, shorter))) == (before, 0)
    state.check_integrity()


@pytest.mark.parametrize(("chance", "is_taken"), [(0.9, True), (0.4, False)])
def test_no_better_set_of_a_burst_has_one_that_is_less_likely_than_asked_for(
    monkeypatch: pytest.MonkeyPatch, chance: float, is_taken: bool
) -> None:
    state = fleet(pending=True)
    state.report(report("a"), 0.0)
    state.admit([ask(LOOSE, LONG)], 0.0)  # the replica is not idle
    monkeypatch.setattr(placement, "plan_chances", lambda *_: np.full(1, chance))
    left = state._to_pending(ask(LOOSE, SHORT), 0.0)
    open_fleet = placement.PlacementFleet(state.slots, state.allocation, state.replicas, state.options)
    (replica,) = state.replicas.values()
    placement._choose_set(open_fleet, replica.slot, [], [left], 0.0)
    assert (left.slot == replica.slot) == is_taken
    assert len(replica.table) == 1 + is_taken
    assert not is_taken or left.chance == chance
