"""What room that is kept for refused clients costs newcomers."""

import msgspec
import numpy as np
import pytest

from controller import returns
from controller.options import FleetOptions
from controller.scaling.tiers import Tier, TierTable
from profiles.store import load_profile
from protocol.messages import AdmissionRequest, Progress, Verdict, request_uid
from simulation.core.loop import Simulation
from simulation.dispatchers.live_fleet import ControllerDispatcher
from simulation.studies.systems import System
from tests.support.fleet_cases import LOOSE, TIGHT, ask, group, report
from tests.support.simulation_cases import a100, jobs_at
from tests.unit.controller.test_returns import TIERS, Clients, busy, refusals


def test_clients_that_never_return_cost_newcomers_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a fleet that keeps no room for anybody."""
    admitted = num_promised()
    monkeypatch.setattr(returns, "is_kept", lambda *args: np.zeros(len(args[-1]), dtype=bool))
    freely = num_promised()
    assert 300 < freely < 540, "it is overloaded"
    assert admitted >= 0.93 * freely


def num_promised() -> int:
    """How many of 600 requests of two tiers are promised where nobody comes back."""
    rng, profile = np.random.default_rng(2), load_profile("embedded-cpu")
    jobs = jobs_at(np.cumsum(rng.exponential(1 / 30.0, 600)).tolist())
    jobs["prompt_tokens"] = np.clip(rng.lognormal(5.2, 1.0, 600), 4, 1000)
    jobs["output_tokens"] = np.clip(rng.lognormal(3.6, 0.9, 600), 2, 250)
    jobs["tier"] = tier = rng.choice(2, 600, p=[0.6, 0.4])
    jobs["ttft_s"], jobs["tpot_s"] = np.array([0.5, 2.0])[tier], np.array([0.05, 0.15])[tier]
    tiers = TierTable.of(1, [Tier("tight", 0.5, 0.05, unattainable="refuse"), Tier("loose", 2.0, 0.15)])
    dispatcher = ControllerDispatcher(profile, tiers, FleetOptions())
    Simulation(jobs, System("never").engines(profile, 0), dispatcher).run()
    return len({d.request_id for d in dispatcher.decisions if d.verdict == Verdict.ADMITTED})


def test_newcomers_are_sent_away_on_credit_only_where_room_that_is_kept_would_take_them() -> None:
    def credit_used(engine: tuple[Progress, ...], newcomers: list[AdmissionRequest]) -> float:
        state, _, _ = refusals(60)
        state.report(report("a", 2, engine), 0.5)
        state.admit(newcomers, 0.5)
        return state.unplaced.returns.share.sent_away

    short = [ask(LOOSE, 500, prompt_digest=900 + i) for i in range(10)]
    assert credit_used((), short) > 3.0
    assert credit_used(busy(), short) == 0.0, "no room, kept or not"


@pytest.mark.parametrize(("now_s", "is_charged"), [(0.5, False), (2.5, True)])
def test_a_group_that_falls_back_to_best_effort_uses_credit_only_where_it_could_be_promised(
    now_s: float, is_charged: bool
) -> None:
    """As best effort it fits anywhere: it used credit also while promised prompts left no time for it."""
    state, _, _ = refusals(60)
    state.report(report("a", 2), now_s)
    decisions = state.admit(group(TIGHT, 3, prompt_digest=99), now_s)
    assert {d.verdict for d in decisions} == {Verdict.BEST_EFFORT}
    assert state.unplaced.returns.share.sent_away == float(is_charged)


def test_one_in_line_for_best_effort_uses_credit_once_however_often_it_asks() -> None:
    """Where nothing waits for room it asks again several times a second, and a few such used up all credit."""
    state, _, _ = refusals(60, best_effort_backlog=0.0)
    asked, now_s, share = ask(msgspec.structs.replace(TIGHT, ttft_s=3.0), 1500, prompt_digest=99), 0.5, 0.0
    for k in range(5):
        state.report(report("a", 2 + k), now_s)
        (decision,) = state.admit([msgspec.structs.replace(asked, age_s=now_s - 0.5)], now_s)
        assert decision.verdict == Verdict.PENDING
        assert request_uid(asked.request_id) in state.unplaced.line
        share, now_s = state.unplaced.returns.share.sent_away, now_s + decision.retry_after_s
        assert 0.9 < share <= 1.0


def test_one_in_line_for_best_effort_takes_no_time_of_a_client_with_the_same_prompt() -> None:
    state, asks, told = refusals(60, best_effort_backlog=0.0)
    due_s = min(d.retry_after_s for d in told)
    (client,) = [a for a, d in zip(asks, told, strict=True) if d.retry_after_s == due_s][:1]
    same = ask(msgspec.structs.replace(TIGHT, ttft_s=0.01), 8000, prompt_digest=client.prompt_digest)
    for now_s in (0.5, due_s):
        state.report(report("a", 2 + int(now_s)), now_s)
        (decision,) = state.admit([msgspec.structs.replace(same, age_s=now_s - 0.5)], now_s)
        assert decision.verdict == Verdict.PENDING
    assert state.unplaced.returns.share.came == 0.0
    state.admit([msgspec.structs.replace(client, request_id="again")], due_s)
    assert state.unplaced.returns.share.came == 1.0


def test_who_asks_too_early_uses_no_credit() -> None:
    state, asks, _ = refusals(60)
    for k in range(20):
        state.report(report("a", 2 + k), now_s := 0.1 + 0.01 * k)
        state.admit([msgspec.structs.replace(asks[-1], request_id=f"again {k}")], now_s)
    assert state.unplaced.returns.share.sent_away == 0.0


def test_newcomers_that_fall_back_to_best_effort_are_sent_away_on_credit_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def num_promised() -> int:
        state, _, _ = refusals(200)
        found = 0
        for k in range(120):
            state.report(report("a", 2 + k), now_s := 0.05 * (k + 1))
            (decision,) = state.admit([ask(TIGHT, 1500, prompt_digest=9000 + k)], now_s)
            found += decision.verdict in (Verdict.ADMITTED, Verdict.PENDING)
        return found

    promised = num_promised()
    monkeypatch.setattr(returns, "is_kept", lambda *args: np.zeros(len(args[-1]), dtype=bool))
    freely = num_promised()
    assert freely > 60
    assert promised >= 0.75 * freely


def test_a_burst_after_four_clients_that_never_returned_is_still_told_times_of_its_own() -> None:
    """A benchmark that drops what is refused, and then clients that keep to the time they were told."""
    clients = Clients(a100(), TIERS, FleetOptions())
    clients.fleet.unplaced.returns.share.note(0.9, missing=4)
    jobs = jobs_at([1.0] * 30, prompt=3000, output=50, ttft_s=0.5, tpot_s=0.05)
    Simulation(jobs, System("clients", max_running=64, replicas=2).engines(a100()), clients).run()
    first = [verdicts[0] for verdicts in clients.came_back.values()]
    assert len(first) >= 20, "more than fit at once"
    assert first.count(Verdict.ADMITTED) >= 0.9 * len(first)
