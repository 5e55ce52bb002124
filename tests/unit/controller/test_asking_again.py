"""Pending requests that ask again and again: what that costs must not grow with how many they are."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from controller import placement
from controller.fleet import Fleet
from controller.options import FleetOptions
from controller.pauses import ASKS_PER_S, LONGEST_PAUSE_S, RETRY_INTERVAL_S, longest_pause_s
from controller.placement import Pending, PlacementFleet
from controller.scaling.tiers import Tier, TierTable
from profiles.store import load_profile
from protocol.messages import AdmissionRequest, Slo, Verdict
from tests.support.fleet_cases import TIGHT, ask, fleet, report

JOB = Slo(e2e_s=60.0, tier="job")


def crowd(count: int) -> tuple[Fleet, list[AdmissionRequest]]:
    """A fleet of one replica, and those of so many long prompts that wait."""
    tiers = TierTable.of(1, [Tier("job", e2e_s=60.0, output_tokens=200)])
    state = Fleet(FleetOptions(), tiers, load_profile)
    state.report(report("a"), 0.0)
    asks = [AdmissionRequest(f"r{i}", 4000, 400, JOB, prompt_digest=i) for i in range(count)]
    verdicts = [state.admit([each], 0.001 * i)[0].verdict for i, each in enumerate(asks)]
    return state, [each for each, verdict in zip(asks, verdicts, strict=True) if verdict == Verdict.PENDING]


def test_a_burst_is_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A controller that falls behind gets their questions together, and planned each such batch like a burst."""
    state, waiting = crowd(200)
    assert len(waiting) > 100
    planned = list[int]()
    plan = placement.reoptimize_burst

    def count(fleet: PlacementFleet, asking: Sequence[Pending], now_s: float) -> None:
        planned.append(len(asking))
        plan(fleet, asking, now_s)

    monkeypatch.setattr(placement, "reoptimize_burst", count)
    state.admit([msgspec.structs.replace(each, age_s=1.0) for each in waiting[-32:]], 1.0)
    assert not planned
    state.admit([AdmissionRequest(f"new{i}", 4000, 400, JOB, prompt_digest=1000 + i) for i in range(3)], 1.0)
    assert planned == [3]


def test_the_more_wait_the_less_often_each_asks() -> None:
    assert longest_pause_s(10) == RETRY_INTERVAL_S[1]
    assert longest_pause_s(200) == 200 / ASKS_PER_S
    assert longest_pause_s(10**6) == LONGEST_PAUSE_S
    state, waiting = crowd(300)
    again = state.admit([msgspec.structs.replace(each, age_s=1.0) for each in waiting[-16:]], 1.0)
    pauses_s = [decision.retry_after_s for decision in again if decision.verdict == Verdict.PENDING]
    assert RETRY_INTERVAL_S[1] < max(pauses_s) <= LONGEST_PAUSE_S


def test_a_request_of_a_burst_asks_two_replicas_for_a_better_set(monkeypatch: pytest.MonkeyPatch) -> None:
    state = fleet()
    for name in "abcdef":
        state.report(report(name), 0.0)
    asked = Counter[str]()
    choose = placement._choose_set

    def count(*arguments: Any) -> None:
        asked.update(p.request.request_id for p in arguments[3])
        choose(*arguments)

    monkeypatch.setattr(placement, "_choose_set", count)
    fits, never = [ask(TIGHT, 50) for _ in range(12)], [ask(TIGHT, 20_000) for _ in range(3)]
    decisions = state.admit([*fits, *never], 0.0)
    assert len({d.replica for d in decisions[:12]}) > placement.MOST_SETS
    assert asked == dict.fromkeys((r.request_id for r in never), placement.MOST_SETS)
