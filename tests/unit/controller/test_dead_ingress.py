"""An ingress dies with requests in every state; nobody tells the controller. What was kept for them is free again."""

import msgspec
import pytest

from controller.fleet import Fleet
from controller.mirror.replica_model import RESERVED_S
from controller.options import FleetOptions
from controller.scaling.tiers import Tier, TierTable
from profiles.store import load_profile
from protocol.messages import Slo, Verdict
from tests.support.fleet_cases import ask, report

WAITS, REFUSES, FLEX = Slo(3.0, 0.1, tier="waits"), Slo(1.0, 0.1, tier="refuses"), Slo(tier="flex", best_effort=True)
TIERS = TierTable.of(
    1, [Tier("refuses", 1.0, 0.1, unattainable="refuse"), Tier("waits", 3.0, 0.1), Tier("flex", best_effort=True)]
)
LONGEST_S = 45.0  # by which even who was told to come back in 30 s is given up


def overloaded() -> Fleet:
    """One replica, which reports nothing, and more than it can do of each kind from ingress ``dead``."""
    options = FleetOptions(length_prior_tokens=100.0, pending=True, best_effort_backlog=0.05)
    state = Fleet(options, TIERS, load_profile)
    state.report(report("a"), 0.0)
    decisions = state.admit([ask(WAITS, 8000) for _ in range(30)], 0.0, "dead")
    decisions += state.admit([ask(REFUSES, 8000) for _ in range(10)], 0.0, "dead")
    decisions += state.admit([ask(FLEX, 500) for _ in range(40)], 0.0, "dead")
    assert {d.verdict for d in decisions} >= {Verdict.ADMITTED, Verdict.PENDING, Verdict.REFUSED}
    assert state.held.pending
    assert state.held.sent
    assert len(state.unplaced.line)
    assert len(state.unplaced.returns)
    return state


def test_nothing_is_kept_for_the_requests_of_an_ingress_that_died() -> None:
    state, now_s, sequence = overloaded(), 0.0, 1
    while now_s < LONGEST_S:
        now_s, sequence = now_s + 0.5, sequence + 1
        state.report(report("a", sequence), now_s)
        if now_s > RESERVED_S:
            decisions = state.admit([ask(REFUSES, 10), ask(FLEX, 10)], now_s, "alive")
            assert decisions[0].verdict == Verdict.ADMITTED, f"the replica is idle, {now_s} s after"
    state.report(report("a", sequence + 1), now_s + RESERVED_S + 0.5)
    state.report(report("a", sequence + 2), now_s + RESERVED_S + 1.0)
    assert not state.held.pending
    assert not state.held.sent
    assert not state.unplaced.waiting
    assert not len(state.unplaced.line)
    assert not len(state.unplaced.returns)
    assert not len(state.replicas["a"].table)
    state.check_integrity()


@pytest.mark.parametrize("ingresses", [2, 4])
def test_the_places_of_a_dead_ingress_go_to_the_others(ingresses: int) -> None:
    """All ask for more than the replica can begin at once; the first dies. What the others hold gets its turn."""
    state, now_s, sequence = Fleet(FleetOptions(length_prior_tokens=100.0), TIERS, load_profile), 0.0, 1
    state.report(report("a"), now_s)
    open_by = {
        f"i{k}": {(asked := ask(WAITS, 3000)).request_id: asked for _ in range(40 // ingresses)}
        for k in range(ingresses)
    }
    due_s = dict.fromkeys(open_by, 0.0)
    started: list[str] = []
    while now_s < 6.0:
        finished = tuple((name, 1) for name in started)
        started = []
        state.report(report("a", sequence, finished=finished), now_s)
        for name, asks in open_by.items():
            if not asks or due_s[name] > now_s or (name == "i0" and now_s > 0.0):
                continue
            again = [msgspec.structs.replace(each, age_s=now_s) for each in asks.values()]
            decisions = state.admit(again, now_s, name)
            begun = [d.request_id for d in decisions if d.verdict in (Verdict.ADMITTED, Verdict.BEST_EFFORT)]
            started += begun if name != "i0" else []  # it died before it could send any
            for request_id in begun:
                del asks[request_id]
            due_s[name] = now_s + min((d.retry_after_s for d in decisions if d.verdict == Verdict.PENDING), default=0.0)
        now_s, sequence = now_s + 0.1, sequence + 1
    assert open_by["i0"], "the one that died had some waiting"
    assert not any(asks for name, asks in open_by.items() if name != "i0")
    assert not state.held.pending
    assert not len(state.replicas["a"].table)
    state.check_integrity()
