"""Refusals that tell when to come back: the time turns out right, nobody steals it, and it is never told in vain."""

import heapq
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest

from controller.fleet import Fleet
from controller.options import FleetOptions
from controller.returns import GRACE_S, MOST_ALIKE
from controller.scaling.tiers import Tier, TierTable
from profiles.store import load_profile
from protocol.messages import AdmissionRequest, Decision, Progress, Slo, Verdict
from routing.returns import PREFILL, SEQUENCES
from serving.ingress.errors import retry_after_s
from simulation.core.loop import Simulation
from simulation.dispatchers.live_fleet import ControllerDispatcher
from simulation.studies.systems import System
from tests.support.fleet_cases import LOOSE, ask, fleet, group, report
from tests.support.simulation_cases import a100, jobs_at

TIERS = TierTable.of(1, [Tier("tier 0", 0.5, 0.05, unattainable="refuse", output_tokens=50)])


@dataclass
class Clients(ControllerDispatcher):
    """Refused clients come back exactly when told; what became of each return, by the request's job."""

    came_back: dict[int, list[Verdict]] = field(default_factory=dict)
    told_s: dict[int, list[float]] = field(default_factory=dict)

    def _carry_out(self, simulation: Simulation, job: int, decision: Decision) -> None:
        if job in self.told_s and decision.verdict != Verdict.PENDING:
            self.came_back.setdefault(job, []).append(decision.verdict)
        if decision.verdict != Verdict.REFUSED:
            super()._carry_out(simulation, job, decision)
            return
        wait_s = retry_after_s(decision.retry_after_s)
        assert wait_s is not None
        self.told_s.setdefault(job, []).append(wait_s)
        simulation.jobs["arrival_s"][job] = simulation.now_s + wait_s
        heapq.heappush(self._again, (simulation.now_s + wait_s, job))


def run(jobs: np.ndarray, has_one_prompt: bool = False) -> Clients:
    clients = Clients(a100(), TIERS, FleetOptions())
    if has_one_prompt:
        admit = clients.fleet.admit
        clients.fleet.admit = lambda batch, *when: admit(  # type: ignore[method-assign]
            [msgspec.structs.replace(each, prompt_digest=1) for each in batch], *when
        )
    Simulation(jobs, System("clients", max_running=64, replicas=2).engines(a100()), clients).run()
    return clients


def test_a_burst_that_is_refused_is_admitted_when_it_comes_back_in_time() -> None:
    """The demo's last act, larger: more long prompts at one instant than the tier's TTFT leaves time for."""
    clients = run(jobs_at([1.0] * 60, prompt=4000, output=50, ttft_s=0.5, tpot_s=0.05))
    first = [verdicts[0] for verdicts in clients.came_back.values()]
    assert len(first) >= 40
    assert first.count(Verdict.ADMITTED) >= 0.9 * len(first)
    reserved = Counter(times[0] for times in clients.told_s.values())
    assert min(reserved) >= 1
    assert len(reserved) >= 4, "not all at the same second"


def test_under_steady_overload_nine_in_ten_are_admitted_when_told_and_newcomers_take_nobodys_room() -> None:
    arrivals_s = np.cumsum(np.random.default_rng(3).exponential(1 / 24.0, 480)).tolist()
    clients = run(jobs_at(arrivals_s, prompt=2000, output=50, ttft_s=0.5, tpot_s=0.05))
    returns = [v for verdicts in clients.came_back.values() for v in verdicts]
    assert len(returns) >= 50, "it was overloaded"
    assert returns.count(Verdict.ADMITTED) >= 0.9 * len(returns)


def test_under_steady_overload_most_are_admitted_when_told_where_all_have_the_same_prompt() -> None:
    """A newcomer with that prompt cannot be told from one that comes as told. One in ten was admitted."""
    arrivals_s = np.cumsum(np.random.default_rng(3).exponential(1 / 24.0, 240)).tolist()
    clients = run(jobs_at(arrivals_s, prompt=2000, output=50, ttft_s=0.5, tpot_s=0.05), has_one_prompt=True)
    returns = [v for verdicts in clients.came_back.values() for v in verdicts]
    assert len(returns) >= 50, "it was overloaded"
    assert returns.count(Verdict.ADMITTED) >= 0.5 * len(returns)


def test_a_pace_that_an_idle_replica_just_bears_is_told_a_time_of_its_own() -> None:
    """A slow machine: whoever is there alone leaves nothing, so told times follow each other."""
    slo = Slo(0.1, 1.02 * float(a100().coefficients[1]), tier="tier 0")
    tiers = TierTable.of(1, [Tier("tier 0", slo.ttft_s, slo.tpot_s, unattainable="refuse", output_tokens=50)])
    state = Fleet(FleetOptions(pending=False), tiers, lambda _: a100())
    state.report(report("a"), 0.0)
    decisions = state.admit([ask(slo, 1000, prompt_digest=i + 1) for i in range(12)], 0.0)
    waits_s = [retry_after_s(d.retry_after_s) for d in decisions if d.verdict == Verdict.REFUSED]
    assert len(waits_s) >= 5
    assert all(wait_s is not None and wait_s < 30 for wait_s in waits_s)
    assert len(set(waits_s)) >= 3, "not all at the same second"


def refusals(count: int, now_s: float = 0.0, **options: Any) -> tuple[Fleet, list[AdmissionRequest], list[Decision]]:
    """A fleet of one replica, ``count`` long prompts at once, and what came of those that were refused."""
    state = fleet(**options)
    state.report(report("a"), now_s)
    asks = [ask(LOOSE, 8000, prompt_digest=i + 1) for i in range(count)]
    decisions = state.admit(asks, now_s)
    refused = [(a, d) for a, d in zip(asks, decisions, strict=True) if d.verdict == Verdict.REFUSED]
    return state, [a for a, _ in refused], [d for _, d in refused]


@pytest.mark.parametrize("cap_s", [5.0, 20.0])
def test_every_refusal_tells_whole_seconds_from_one_to_the_cap_and_not_all_the_same(cap_s: float) -> None:
    _, asks, decisions = refusals(200, retry_cap_s=cap_s)
    reserved = Counter(d.retry_after_s for d in decisions)
    assert len(asks) > 100
    assert set(reserved) <= set(np.arange(1.0, cap_s + 1.0).tolist())
    kept = [reserved[second] for second in sorted(reserved) if second < cap_s]
    assert len(kept) >= 3
    assert max(kept) <= 2 * np.median(kept) + 2, "as many a second as there will be room for"


def test_who_asks_too_early_gets_a_later_time_and_may_come_at_the_first() -> None:
    """Every third of a second, it was told the same number of seconds each time, for ever."""
    state, asks, decisions = refusals(60)
    last, told_s = asks[-1], decisions[-1].retry_after_s
    assert 3.0 <= told_s < 30.0
    for k in range(1, 6):
        state.report(report("a", 1 + k, busy()), 0.3 * k)
        (early,) = state.admit([msgspec.structs.replace(last, request_id=f"early {k}")], 0.3 * k)
        assert early.verdict == Verdict.REFUSED
        assert 0.3 * k + early.retry_after_s >= told_s
    state.report(report("a", 10), told_s)
    (in_time,) = state.admit([msgspec.structs.replace(last, request_id="in time")], told_s)
    assert in_time.verdict == Verdict.ADMITTED


def test_clients_with_the_same_prompt_have_a_time_each_and_no_more_than_so_many() -> None:
    """One reserved return served them all: of 480, 11 % were admitted when they came as told."""
    state = fleet(retry_cap_s=30.0)
    state.report(report("a"), 0.0)
    decisions = state.admit([ask(LOOSE, 8000, prompt_digest=7) for _ in range(60)], 0.0)
    told = Counter(d.retry_after_s for d in decisions if d.verdict == Verdict.REFUSED)
    assert told == Counter(d.retry_after_s for d in refusals(60)[2]), "as of different prompts"
    state.report(report("a", 2, busy()), 0.1)
    state.admit([ask(LOOSE, 10, prompt_digest=8) for _ in range(2 * MOST_ALIKE)], 0.1)
    assert len(state.unplaced.returns) - sum(told.values()) <= MOST_ALIKE


def test_an_early_one_whose_replica_is_gone_is_told_when_another_has_room() -> None:
    state, asks, _ = refusals(60)
    state.report(report("b"), 0.1)
    state.hand_over("a", 0.2, "gone")
    early, newcomer = asks[-1], ask(LOOSE, 8000, prompt_digest=10_000)
    state.report(report("b", 2, busy()), 0.3)
    told = [d.retry_after_s for d in state.admit([early, newcomer], 0.3)]
    assert abs(told[0] - told[1]) <= 1.0
    assert told[0] < 30.0


def busy() -> tuple[Progress, ...]:
    """So many decodes that nothing more fits."""
    return tuple(Progress(f"full{i}", LOOSE, 0.5, 1500, 1505, 6, 100, 200, True) for i in range(256))


def told_second(state: Fleet, now_s: float) -> float:
    """The time told to one more long prompt, where as many are refused as at first."""
    state.report(report("a", 100 + int(now_s)), now_s)
    return state.admit([ask(LOOSE, 8000, prompt_digest=5000 + i) for i in range(60)], now_s)[-1].retry_after_s


def test_what_nobody_comes_back_for_is_kept_no_longer_and_less_of_it_the_next_time() -> None:
    first_s = told_second(refusals(0)[0], 1.0)
    state, _, decisions = refusals(60)
    told_s = [d.retry_after_s for d in decisions if d.retry_after_s < 30.0]
    assert len(state.unplaced.returns) == len(told_s)
    gone_s = max(told_s) + GRACE_S + 1.0
    state.report(report("a", 2), gone_s)
    assert state.admit([ask(LOOSE, 8000, prompt_digest=999)], gone_s)[0].verdict == Verdict.ADMITTED
    assert len(state.unplaced.returns) == 0
    share = state.unplaced.returns.share
    assert (share.came, share.missing) == (0.0, len(told_s))
    assert np.abs(state.unplaced.returns._ledger.reserved).max(initial=0.0) < 1e-6
    assert told_second(state, gone_s + 1.0) < 0.5 * first_s


def test_what_no_idle_replica_could_ever_do_is_told_no_time() -> None:
    state = fleet(unattainable="refuse")
    state.report(report("a"), 0.0)
    too_much = [Slo(0.001, 0.03, tier="loose"), Slo(0.3, 1e-5, tier="loose"), Slo(e2e_s=0.01, tier="loose")]
    decisions = state.admit([ask(slo, 3000) for slo in too_much] + [ask(LOOSE, 500_000)], 0.0)
    assert [(d.verdict, d.retry_after_s) for d in decisions] == [(Verdict.REFUSED, 0.0)] * 4
    assert len(state.unplaced.returns) == 0


def test_a_replica_that_is_gone_takes_the_room_it_kept_with_it() -> None:
    state, _, _ = refusals(60)
    state.report(report("b"), 40.0)
    assert "a" not in state.replicas
    assert not state.unplaced.returns._ledger.reserved.any()
    assert state.admit([ask(LOOSE, 8000)], 40.0)[0].verdict == Verdict.ADMITTED
    state.check_integrity()


def again(asks: list[AdmissionRequest]) -> list[AdmissionRequest]:
    """The same prompts under other names, in another order."""
    name = asks[0].request_id
    return [msgspec.structs.replace(a, request_id=f"{a.request_id} again", group=f"{name} again") for a in asks[::-1]]


def refused_group() -> tuple[Fleet, list[AdmissionRequest], float]:
    """A fleet that is full, four sequences that it refused, and what they were told."""
    state = fleet()
    state.report(report("a", 1, busy()), 0.0)
    asks = [msgspec.structs.replace(a, prompt_digest=7 + i) for i, a in enumerate(group(LOOSE, 4, prompt_tokens=6000))]
    decisions = state.admit(asks, 0.0)
    assert {d.verdict for d in decisions} == {Verdict.REFUSED}
    (told_s,) = {d.retry_after_s for d in decisions}
    assert 1.0 <= told_s < 30.0
    return state, asks, told_s


def test_a_request_of_several_sequences_is_known_when_it_comes_back_and_goes_before_newcomers() -> None:
    state, asks, told_s = refused_group()
    state.report(report("a", 2), told_s)
    newcomers = [ask(LOOSE, 8000, prompt_digest=100 + i) for i in range(60)]
    decisions = state.admit([*newcomers, *again(asks)], told_s)
    assert {d.verdict for d in decisions[60:]} == {Verdict.ADMITTED}
    assert Verdict.REFUSED in {d.verdict for d in decisions[:60]}
    state.admit([ask(LOOSE)], told_s + 0.5)
    assert state.unplaced.returns.share.came == pytest.approx(1.0, rel=0.02)
    assert state.unplaced.returns.share.missing == 0.0
    state.check_integrity()


def test_room_is_kept_for_all_sequences_of_a_request() -> None:
    state, _, _ = refused_group()
    ledger = state.unplaced.returns._ledger
    assert ledger.reserved[0, :, SEQUENCES].max() == 4.0
    single = fleet()
    single.report(report("a", 1, busy()), 0.0)
    single.admit([ask(LOOSE, 6000)], 0.0)
    one = single.unplaced.returns._ledger.reserved
    assert ledger.reserved[0, :, PREFILL].sum() == pytest.approx(4.0 * one[0, :, PREFILL].sum())


def test_a_request_of_several_sequences_that_comes_too_early_may_come_at_its_first_time() -> None:
    state, asks, told_s = refused_group()
    state.report(report("a", 2, busy()), 0.5)
    assert {d.verdict for d in state.admit(again(asks), 0.5)} == {Verdict.REFUSED}
    state.report(report("a", 3), told_s)
    assert {d.verdict for d in state.admit(again(asks), told_s)} == {Verdict.ADMITTED}


def back_on_time(newcomers: int) -> list[Verdict]:
    """What becomes of those told the first second, where so many requests of three sequences come just before."""
    state, asks, decisions = refusals(60)
    first_s = min(d.retry_after_s for d in decisions)
    due = [a for a, d in zip(asks, decisions, strict=True) if d.retry_after_s == first_s]
    state.report(report("a", 2), first_s - 0.1)
    for _ in range(newcomers):
        state.admit(group(LOOSE, 3, prompt_tokens=8000), first_s - 0.05)
    back = [msgspec.structs.replace(a, request_id=f"{a.request_id} again") for a in due]
    return [d.verdict for d in state.admit(back, first_s)]


def test_newcomers_of_several_sequences_leave_told_room_free() -> None:
    undisturbed = back_on_time(0)
    assert undisturbed.count(Verdict.ADMITTED) >= 5
    assert back_on_time(12) == undisturbed


def test_a_replica_that_is_gone_takes_the_room_of_several_sequences_with_it() -> None:
    state, _, _ = refused_group()
    state.report(report("b"), 40.0)
    assert "a" not in state.replicas
    state.admit([ask(LOOSE)], 40.0)
    assert np.abs(state.unplaced.returns._ledger.reserved).max() < 1e-6


def test_room_kept_for_returns_turns_no_best_effort_away() -> None:
    """What no promise can be given to is served as best effort, which takes none of that room."""
    tiers = TierTable.of(
        1, [Tier("ref", 0.5, 0.05, unattainable="refuse"), Tier("be", 0.6, 0.06), Tier("flex", best_effort=True)]
    )
    state = Fleet(FleetOptions(length_prior_tokens=40.0), tiers, load_profile)
    state.report(report("a"), 0.0)
    refused = Slo(0.5, 0.05, tier="ref")
    state.admit([msgspec.structs.replace(ask(refused, 6000), prompt_digest=k + 1) for k in range(60)], 0.0)
    assert len(state.unplaced.returns) > 10
    (decision,) = state.admit([ask(Slo(0.6, 0.06, tier="be"), 60_000)], 0.1)
    assert (decision.verdict, decision.replica) == (Verdict.BEST_EFFORT, "a")
