"""Room that was kept for refused clients on a replica that is gone or reborn: another one keeps as much."""

from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from controller.disaggregation.phases import Phase
from controller.fleet import Fleet
from controller.returns import GRACE_S
from protocol.messages import AdmissionRequest, Decision, Verdict
from routing.returns import SEQUENCES
from tests.support.fleet_cases import LOOSE, TIERS, ask, report
from tests.unit.controller.test_returns import again, refusals, refused_group


def gone(state: Fleet) -> str:
    state.report(report("b"), 0.1)
    state.hand_over("a", 0.2, "gone")
    return "b"


def gone_before_another_came(state: Fleet) -> str:
    state.hand_over("a", 0.2, "gone")
    state.admit([ask(LOOSE)], 0.3)
    state.report(report("b"), 0.4)
    return "b"


def reborn(state: Fleet) -> str:
    state.report(report("a", incarnation="2"), 0.2)
    return "a"


def undisturbed(_state: Fleet) -> str:
    return "a"


def back(state: Fleet, name: str, refused: list[tuple[AdmissionRequest, Decision]]) -> tuple[int, int, int]:
    """Of those told the first four seconds, how many come and are admitted, where newcomers come before each; and how
    many of these are admitted."""
    seconds, due, admitted, newcomers = sorted({d.retry_after_s for _, d in refused}), 0, 0, 0
    incarnation = state.replicas[name].incarnation
    for second in seconds[:4]:
        state.report(report(name, int(second) + 10, incarnation=incarnation), second - 0.5)
        for k in range(4):
            now_s = second - 0.5 + 0.1 * k
            asks = [ask(LOOSE, 8000, prompt_digest=int(10_000 * now_s) + i) for i in range(4)]
            newcomers += sum(d.verdict == Verdict.ADMITTED for d in state.admit(asks, now_s))
        own = [
            msgspec.structs.replace(a, request_id=f"{a.request_id} again")
            for a, d in refused
            if d.retry_after_s == second
        ]
        due += len(own)
        admitted += sum(d.verdict == Verdict.ADMITTED for d in state.admit(own, second))
    return due, admitted, newcomers


@pytest.mark.parametrize("happens", [undisturbed, gone, gone_before_another_came, reborn])
def test_who_comes_back_in_time_goes_before_newcomers_whatever_became_of_the_replica(
    happens: Callable[[Fleet], str],
) -> None:
    state, asks, decisions = refusals(60)
    name = happens(state)
    due, admitted, newcomers = back(state, name, list(zip(asks, decisions, strict=True)))
    assert due >= 15
    assert admitted >= 0.75 * due
    assert newcomers <= 20, "of 64: room was kept from others"
    state.check_integrity()


def test_lost_room_is_spread_over_those_that_are_left_and_given_up_with_those_who_do_not_come() -> None:
    state, _, decisions = refusals(60)
    returns = state.unplaced.returns
    before, kept = returns._ledger.reserved.sum(axis=(0, 1)), len(returns)
    for name in ("b", "c"):
        state.report(report(name), 0.1)
    state.hand_over("a", 0.2, "gone")
    assert not returns._ledger.reserved.any()
    state.admit([ask(LOOSE)], 0.3)
    slots = [state.replicas[name].slot for name in ("b", "c")]
    reserved = returns._ledger.reserved
    assert reserved.sum(axis=(0, 1)) == pytest.approx(before)
    assert reserved[slots[0], :, SEQUENCES].sum() == pytest.approx(reserved[slots[1], :, SEQUENCES].sum(), rel=0.2)
    assert sum(returns._kept_on.values()) == len(returns) == kept
    gone_s = max(d.retry_after_s for d in decisions) + GRACE_S + 1.0
    state.report(report("b", 2), gone_s)
    state.admit([ask(LOOSE)], gone_s)
    assert len(returns) == 0
    assert np.abs(returns._ledger.reserved).max() < 1e-6
    assert not returns._kept_on
    assert not returns._homeless


def test_a_request_of_several_sequences_keeps_its_room_elsewhere() -> None:
    state, asks, told_s = refused_group()
    state.report(report("b", 1), 0.5)
    state.hand_over("a", 0.6, "gone")
    state.report(report("b", 2), told_s - 0.3)
    for k in range(4):
        state.admit([ask(LOOSE, 6000, prompt_digest=500 + k)], told_s - 0.3 + 0.01 * k)
    assert state.unplaced.returns._ledger.reserved[state.replicas["b"].slot, :, SEQUENCES].max() == 4.0
    assert {d.verdict for d in state.admit(again(asks), told_s)} == {Verdict.ADMITTED}
    state.check_integrity()


def test_lost_room_waits_for_replicas_of_its_own_phase_and_for_those_that_its_tier_may_use() -> None:
    state, _, _ = refusals(60)
    returns = state.unplaced.returns
    for (each,) in returns._returns_by_key.values():
        each.phase = Phase.PREFILL
    gone(state)
    state.admit([ask(LOOSE)], 0.3)
    assert not returns._ledger.reserved.any()
    for (each,) in returns._returns_by_key.values():
        each.phase = None
    slot = state.replicas["b"].slot
    loose = [tier.name for tier in TIERS.tiers].index("loose")
    state.unplaced.remap_tiers(np.array([loose, 0, 2]))
    assert {each.tier for (each,) in returns._returns_by_key.values()} == {0}
    state.slots.fleet_state.replicas["tier"][slot] = loose
    state.admit([ask(LOOSE)], 0.4)
    assert not returns._ledger.reserved[slot].any(), "a looser replica than their tier has now"
    state.slots.fleet_state.replicas["tier"][slot] = 0
    state.admit([ask(LOOSE)], 0.5)
    assert returns._ledger.reserved[slot].any()
