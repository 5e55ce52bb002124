"""The fleet's decisions: admission, hops, fallback, soft state."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.fleet import Fleet
from controller.mirror.lengths import WINDOW
from controller.mirror.replica_model import admission_row
from controller.options import FleetOptions
from controller.scaling.tiers import Tier, TierTable
from controller.status import fleet_status
from controller.unplaced import PENDING_TIMEOUT_S, UNBOUND_S, latest_start_s
from profiles.store import load_profile
from protocol.messages import AdmissionRequest, Progress, Slo, Verdict
from tests.support.fleet_cases import FLEX, LOOSE, TIERS, TIGHT, ask, ended, fleet, report


def test_an_idle_replica_admits_with_a_prediction_within_the_slo() -> None:
    state = fleet()
    state.report(report("a"), 0.0)
    (decision,) = state.admit([ask(TIGHT)], 0.0)
    assert (decision.verdict, decision.replica, decision.tier) == (Verdict.ADMITTED, "a", "tight")
    assert 0.0 < decision.predicted_ttft_s <= TIGHT.ttft_s
    assert 0.0 < decision.predicted_tpot_s <= TIGHT.tpot_s


def test_a_full_replica_sends_the_rest_to_the_next_and_then_best_effort() -> None:
    state = fleet()
    state.report(report("a"), 0.0)
    state.report(report("b"), 0.0)
    decisions = state.admit([ask(TIGHT, 4000) for _ in range(12)], 0.0)
    admitted = [d for d in decisions if d.verdict == Verdict.ADMITTED]
    fallen = [d for d in decisions if d.verdict == Verdict.BEST_EFFORT]
    assert {d.replica for d in admitted} == {"a", "b"}
    assert {d.reason for d in fallen} <= {"ttft_unattainable", "tpot_unattainable", "would_break_admitted"}
    assert {d.tier for d in fallen} == {"flex"}
    assert len(admitted) + len(fallen) == 12
    assert fallen
    assert any(d.hops for d in decisions)
    assert all(np.isfinite(d.predicted_ttft_s) for d in admitted)
    state.check_integrity()


def test_what_does_not_fit_now_waits_for_room_until_it_would_be_too_late() -> None:
    state = fleet(pending=True)
    state.report(report("a"), 0.0)
    asks = [ask(TIGHT, 4000) for _ in range(12)]
    decisions = state.admit(asks, 0.0)
    waits = [(a, d) for a, d in zip(asks, decisions, strict=True) if d.verdict == Verdict.PENDING]
    assert waits
    assert all(0.0 < d.retry_after_s <= 0.25 and d.replica == "" for _, d in waits)
    assert fleet_status(state, 0.0)["waiting"] == {"tight": len(waits)}
    first = waits[0][0]
    for a in asks:
        if a is not first:
            state.on_outcome(ended(a, "abort"), 0.05)
    state.report(report("a", 2), 0.1)
    (decision,) = state.admit([msgspec.structs.replace(first, age_s=0.05)], 0.1)
    assert decision.verdict == Verdict.ADMITTED, "room was made in time"
    last = ask(TIGHT, 4000, age_s=0.29)
    assert state.admit([last], 0.1)[0].verdict == Verdict.BEST_EFFORT, "too late to wait"
    state.report(report("a", 3), 9.0)
    assert state.unplaced.waiting == {}


@pytest.mark.parametrize(
    ("slo", "least_s", "most_s"),
    [
        (Slo(e2e_s=60.0, tier="tight"), 59.0, 59.9),  # some 0.6 s of service
        (Slo(ttft_s=3.0, e2e_s=10.0, tier="tight"), 2.9, 3.0),
        (Slo(tpot_s=0.03, tier="tight"), UNBOUND_S, UNBOUND_S),
    ],
)
def test_how_long_room_is_waited_for_with_and_without_a_ttft(slo: Slo, least_s: float, most_s: float) -> None:
    """Until it would be too late on an idle replica: a moment before, that one would still promise all of it."""
    state, asked = fleet(pending=True), ask(slo, 100)
    state.report(report("a"), 0.0)
    state._open(0.0)
    latest_s = latest_start_s(state.slots, admission_row(asked, 0, state.lengths, 0.0), 0.0)
    assert least_s <= latest_s <= most_s
    state.report(report("a", 2), latest_s - 0.02)
    (decision,) = state.admit([msgspec.structs.replace(asked, age_s=latest_s - 0.01)], latest_s - 0.01)
    assert decision.verdict == Verdict.ADMITTED


def test_a_pending_request_is_forgotten_when_its_ingress_asks_no_more_and_not_before() -> None:
    state, asked = fleet(pending=True), ask(Slo(tpot_s=0.03, tier="tight"), 100)
    full = tuple(Progress(f"p{i}", LOOSE, 0.1, 500, 505, 6, 100, 200, True) for i in range(256))
    for second in range(8):
        state.report(report("a", second + 1, full), float(second))
        (decision,) = state.admit([msgspec.structs.replace(asked, age_s=float(second))], float(second))
        assert decision.verdict == Verdict.PENDING
        assert len(state.unplaced.waiting) == 1
    state.report(report("a", 9, full), 7.0 + PENDING_TIMEOUT_S + 0.1)
    assert state.unplaced.waiting == {}


def test_a_burst_gets_no_fewer_promises_than_its_requests_one_after_the_other() -> None:
    state = fleet()
    state.report(report("a"), 0.0)
    pace = Slo(3.0, 0.0075, tier="tight")
    singles = [state.admit([a], 0.0)[0].verdict for a in (ask(pace, 400), *(ask(TIGHT, 5500) for _ in range(3)))]
    state = fleet()
    state.report(report("a"), 0.0)
    together = [d.verdict for d in state.admit([ask(pace, 400), *(ask(TIGHT, 5500) for _ in range(3))], 0.0)]
    assert together.count(Verdict.ADMITTED) >= singles.count(Verdict.ADMITTED)
    state.check_integrity()


def test_a_tier_that_refuses_says_when_to_come_back() -> None:
    state = fleet(retry_cap_s=20.0)
    state.report(report("a"), 0.0)
    decisions = state.admit([ask(LOOSE, 8000) for _ in range(60)], 0.0)
    refused = [d for d in decisions if d.verdict == Verdict.REFUSED]
    assert refused
    assert all(1.0 <= d.retry_after_s <= 20.0 for d in refused)


def test_what_no_idle_replica_could_do_is_refused_for_good() -> None:
    state = fleet(unattainable="refuse")
    state.report(report("a"), 0.0)
    (decision,) = state.admit([ask(Slo(0.001, 0.03, tier="tight"), 3000)], 0.0)
    assert (decision.verdict, decision.retry_after_s) == (Verdict.REFUSED, 0.0)


def test_a_stream_in_flight_is_never_refused() -> None:
    state = fleet()
    state.report(report("a"), 0.0)
    decisions = state.admit([ask(LOOSE, 8000, emitted_tokens=5) for _ in range(60)], 0.0)
    assert {d.verdict for d in decisions} == {Verdict.ADMITTED, Verdict.BEST_EFFORT}


def test_best_effort_goes_where_least_is_to_do() -> None:
    state = fleet()
    state.report(report("a"), 0.0)
    state.report(report("b"), 0.0)
    first, second = state.admit([ask(FLEX, 4000), ask(FLEX, 100)], 0.0)
    assert {first.replica, second.replica} == {"a", "b"}
    assert first.verdict == Verdict.ADMITTED


def test_no_live_replica_is_told_as_such() -> None:
    state = fleet()
    assert state.admit([ask(TIGHT)], 0.0)[0].reason == "no_replica"
    state.report(report("a"), 0.0)
    assert state.admit([ask(TIGHT)], 1.0)[0].replica == "a"
    assert state.admit([ask(TIGHT)], 10.0)[0].replica == "a", "silent, but there is no other"
    assert state.admit([ask(TIGHT)], 40.0)[0].reason == "no_replica", "silent for too long"
    state.report(report("a", 2), 40.0)
    state.on_failed("a", 40.0)
    assert state.admit([ask(TIGHT)], 40.1)[0].reason == "no_replica", "an ingress saw it fail"
    state.report(report("a", 1, incarnation="2"), 40.2)
    assert state.admit([ask(TIGHT)], 40.3)[0].replica == "a", "reborn"


def test_a_silent_replica_waits_behind_those_that_report() -> None:
    state = fleet()
    state.report(report("a"), 0.0)
    state.report(report("b"), 10.0)
    assert {state.admit([ask(TIGHT)], 10.0)[0].replica for _ in range(4)} == {"b"}


def test_the_excluded_replica_is_avoided_while_another_lives() -> None:
    state = fleet()
    state.report(report("a"), 0.0)
    state.report(report("b"), 0.0)
    assert {state.admit([ask(TIGHT, exclude=("a",))], 0.0)[0].replica for _ in range(4)} == {"b"}
    assert state.admit([ask(TIGHT, exclude=("a", "b"))], 0.0)[0].replica in ("a", "b")


def test_reservations_come_back_from_reports_after_a_restart() -> None:
    old = fleet()
    old.report(report("a"), 0.0)
    held = [ask(LOOSE, 2000) for _ in range(8)]
    old.admit(held, 0.0)
    progress = tuple(Progress(a.request_id, a.slo, 0.1, a.prompt_tokens, 0, 0, 100, a.max_tokens, False) for a in held)
    old.report(report("a", 2, progress), 0.1)
    new = fleet()
    new.report(report("a", 3, progress), 0.1)
    probe = [ask(TIGHT, 3000) for _ in range(6)]
    before, after = old.admit(probe, 0.1), new.admit(probe, 0.1)
    assert [d.verdict for d in before] == [d.verdict for d in after]
    np.testing.assert_allclose(
        [d.predicted_ttft_s for d in before], [d.predicted_ttft_s for d in after], rtol=0, atol=1e-9
    )


def test_an_outcome_frees_the_reservation_and_a_lost_one_expires() -> None:
    state = fleet()
    state.report(report("a"), 0.0)
    first, second = ask(TIGHT), ask(TIGHT)
    state.admit([first, second], 0.0)
    state.on_outcome(ended(first, "abort"), 0.1)
    assert len(state.replicas["a"].table) == 1
    state.report(report("a", 2), 0.2)
    assert len(state.replicas["a"].table) == 1, "decided, perhaps not arrived yet"
    state.report(report("a", 3), 10.0)
    assert len(state.replicas["a"].table) == 0


def test_old_reports_and_old_tables_change_nothing() -> None:
    state = fleet()
    state.report(report("a", 5, draining=True), 0.0)
    state.report(report("a", 4), 0.0)
    assert state.replicas["a"].draining
    assert not state.set_tiers(TierTable.of(1, [Tier("other", 1.0, 1.0)]), 0.0)
    assert state.set_tiers(TierTable.of(2, [Tier("other", 1.0, 1.0)]), 0.0)
    assert [tier.name for tier in state.tiers.tiers] == ["other"]


def test_tiers_state_the_length_of_their_outputs_until_some_have_finished() -> None:
    def table(version: int, output_tokens: int) -> TierTable:
        stated = [msgspec.structs.replace(t, output_tokens=output_tokens * (t.name == "tight")) for t in TIERS.tiers]
        return TierTable.of(version, stated)

    def predicted(slo: Slo) -> int:
        (decision,) = state.admit([ask(slo)], 0.0)
        return decision.output_tokens

    state = Fleet(FleetOptions(length_prior_tokens=100.0), table(1, 30), load_profile)
    state.report(report("a"), 0.0)
    assert (predicted(TIGHT), predicted(LOOSE)) == (30, 100)
    state.set_tiers(table(2, 60), 0.0)
    assert (predicted(TIGHT), predicted(LOOSE)) == (60, 100)
    for _ in range(WINDOW):
        state.on_outcome(ended(ask(TIGHT), "stop", 60), 0.0)
    state.set_tiers(table(3, 150), 0.0)
    assert predicted(TIGHT) == 60


@pytest.mark.parametrize("routing", ["round_robin", "least_loaded"])
def test_baselines_take_everything_unchecked(routing: str) -> None:
    state = fleet(routing=routing)
    for name in ("a", "b"):
        state.report(report(name), 0.0)
    decisions = state.admit([ask(TIGHT, 4000) for _ in range(20)], 0.0)
    assert {d.verdict for d in decisions} == {Verdict.ADMITTED}
    assert {d.reason for d in decisions} == {"admission_off"}
    assert [d.replica for d in decisions].count("a") == 10


def test_status_is_plain_json() -> None:
    state = fleet()
    state.report(report("a"), 0.0)
    state.admit([ask(TIGHT)], 0.0)
    status = msgspec.json.decode(msgspec.json.encode(fleet_status(state, 0.5)))
    assert status["replicas"][0]["requests"] == 1
    assert status["replicas"][0]["engine"]["running"] == 0
    assert [tier["name"] for tier in status["tiers"]] == ["tight", "loose", "flex"]


events = st.lists(
    st.tuples(st.sampled_from(["ask", "report", "end", "fail", "wait"]), st.integers(0, 2), st.integers(1, 6000)),
    max_size=25,
)


@settings(max_examples=60, deadline=None)
@given(story=events)
def test_integrity_under_random_events(story: list[tuple[str, int, int]]) -> None:
    """Whatever happens, every request is on at most one replica and the tables stay sound."""
    state, now_s, sequence, asked = fleet(pending=True), 0.0, 0, list[AdmissionRequest]()
    for kind, which, size in story:
        name, sequence = "abc"[which], sequence + 1
        if kind == "ask":
            new = [ask((TIGHT, LOOSE, FLEX)[which], size)]
            asked += new
            state.admit(new, now_s)
        elif kind == "report":
            known = state.replicas.get(name)
            held = set(known.table["id"]) if known else set()
            progress = tuple(
                Progress(a.request_id, a.slo, 0.2, a.prompt_tokens, 0, 0, 100, 200, False)
                for a in asked[-3:]
                if uid(a) in held
            )
            state.report(report(name, sequence, progress), now_s)
        elif kind == "end" and asked:
            state.on_outcome(ended(asked.pop(size % len(asked)), "stop", size % 200), now_s)
        elif kind == "fail":
            state.on_failed(name, now_s)
        else:
            now_s += size / 2000.0
        state.check_integrity()
        assert all(len(set(r.table["id"])) == len(r.table) for r in state.replicas.values())


def uid(ask_: AdmissionRequest) -> int:
    from protocol.messages import request_uid

    return request_uid(ask_.request_id)
