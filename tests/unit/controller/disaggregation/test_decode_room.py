"""Room for decodes: reserved while a prompt is computed, and looked for at the hand-over."""

import msgspec
import numpy as np
import pytest

from controller.disaggregation.decode_room import GRACE_S, DecodeRoom, Reservation
from controller.disaggregation.fleet import DisaggregatedFleet, make_fleet
from controller.disaggregation.phases import HAND_OVER_S, Phase, PhaseOptions
from controller.mirror.replica_model import RESERVED_S
from controller.options import FleetOptions
from controller.scaling.allocation import AllocationOptions
from controller.scaling.signals import ScalingOptions
from planning.tables import REQUEST
from profiles.store import load_profile
from protocol.messages import Progress, Scope, Slo, Verdict, request_uid
from protocol.programs import RELEASED
from tests.support.disaggregated_cases import fleet, full, one, second
from tests.support.fleet_cases import FLEX, LOOSE, TIERS, TIGHT, ask, ended, in_progress, report


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
    whole, then = state.admit([ask(LOOSE, 9000, can_disaggregate=False), second(asked)], 0.1)
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
            state.on_outcome(ended(asked, "abort"), 0.1)
        elif gives_back == "time":
            now_s = RESERVED_S + GRACE_S + 0.1
            for name in "pq":
                state.report(report(name, 9000), RESERVED_S + 0.05)
            nearly_full(state, "d", now_s)
        else:
            state.report(report("d", incarnation="2"), 0.1)
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
    told = msgspec.structs.replace(ended(asked, RELEASED), scope=Scope.SEQUENCE, first_token_met=False)
    state.on_outcome(told, 10.0)
    assert list(state.room.held) == [request_uid(asked.request_id)], "it goes on"


def test_room_that_nobody_will_ask_for_is_given_back_though_nobody_asks_anything() -> None:
    state = fleet("pqd")
    where = one(state, asked := ask(LOOSE, 9000)).replica
    for tick in range(1, 20):
        for name in "pqd":
            still = in_progress(asked) if name == where and tick < 4 else ()
            state.report(report(name, tick + 1, still), tick * 0.5)
        if tick * 0.5 <= GRACE_S:
            assert state.room.held
    assert not state.room.held


def test_what_is_not_prefilled_reserves_nothing() -> None:
    state = fleet("pd", 1)
    late = ask(Slo(0.001, 0.1, tier="loose"), 9000)
    assert not one(state, late).prefill_only
    one(state, ask(FLEX, 500))
    assert state.room.held == {}


def slow_link(s_per_token: float) -> DisaggregatedFleet:
    phases = PhaseOptions(1, adapt=False, transfer_s_per_token=s_per_token)
    state = make_fleet(FleetOptions(length_prior_tokens=100.0, phases=phases), TIERS, load_profile)
    assert isinstance(state, DisaggregatedFleet)
    for name in "pd":
        state.report(report(name), 0.0)
    return state


def test_the_second_token_is_promised_after_the_kv_cache_has_travelled() -> None:
    slo, told = Slo(0.3, 0.03, tier="tight"), {}
    for s_per_token in (0.0, 1e-4):  # 1,000 tokens: 0.1 s
        state = slow_link(s_per_token)
        asked = ask(slo, 1000)
        first = one(state, asked)
        due_s = float(state.replicas["p"].table["ttft_s"][0])
        then = one(state, second(asked), 0.1)
        told[s_per_token] = then.predicted_tpot_s
        assert (then.replica, first.transfer_s) == ("d", pytest.approx(1000 * s_per_token))
        assert due_s == pytest.approx(0.3 - max(0.0, 1000 * s_per_token - 0.03)), "of the prefill"
        assert float(state.replicas["d"].table["ttft_s"][0]) == pytest.approx(0.3 - 1000 * s_per_token)
    assert told[1e-4] > told[0.0]


def test_what_would_travel_for_too_long_is_served_whole() -> None:
    asked = ask(Slo(0.3, 0.03, tier="tight"), 1000)
    assert one(slow_link(1e-4), asked).prefill_only
    state = slow_link(1e-3)
    decision = one(state, asked)
    assert (decision.replica, decision.prefill_only, decision.reason) == ("d", False, "attainable")
    assert state.room.held == {}


def test_what_has_travelled_is_not_counted_again() -> None:
    state = slow_link(1e-4)
    asked = ask(Slo(0.3, 0.03, tier="tight"), 1000)
    one(state, asked)
    one(state, msgspec.structs.replace(second(asked), travelled_s=0.1), 0.1)
    assert float(state.replicas["d"].table["ttft_s"][0]) == pytest.approx(0.3)


def test_room_on_a_replica_that_is_of_no_use_is_given_up() -> None:
    row = np.zeros((), dtype=REQUEST)
    room = DecodeRoom({1: Reservation("d", 0, row, 0.0), 2: Reservation("e", 1, row, 0.0)})
    room.expire(["e"], lambda _: True, 0.0)
    assert list(room.held) == [2]


def test_what_is_reserved_on_a_replica_that_leaves_moves_or_is_used_there() -> None:
    state = fleet("pqde", allocation=AllocationOptions(scaling=ScalingOptions(max_replicas=4, phases=tuple(Phase))))
    full(state, "e", 0.0)
    asked = ask(LOOSE, 9000)
    assert one(state, asked).prefill_only
    uid = request_uid(asked.request_id)
    state.allocation.roles.drain("d", 0.0, "demand takes less")
    state.admit([], 0.01)
    assert state.room.held[uid].replica == "d", "nowhere else is room"
    (leaving,) = [view for view in state.views(0.01) if view.name == "d"]
    assert not leaving.is_empty, "so it is not ended"
    assert not one(state, ask(LOOSE, 9000), 0.02).prefill_only, "it takes nothing new"
    then = one(state, second(asked), 0.1)
    assert (then.verdict, then.replica, then.reason) == (Verdict.ADMITTED, "d", "attainable")
    state.report(report("e", 200), 0.2)
    other = ask(LOOSE, 9000)
    state.allocation.roles.restore("d", state.views(0.2), 0.2, "demand came back")
    state.report(report("d", 200), 0.2)
    assert one(state, other, 0.2).prefill_only
    where = state.room.held[request_uid(other.request_id)].replica
    state.allocation.roles.drain(where, 0.2, "demand takes less")
    state.admit([], 0.21)
    assert state.room.held[request_uid(other.request_id)].replica == ({"d", "e"} - {where}).pop()
    state.check_integrity()


def test_what_is_reserved_on_a_replica_that_says_it_drains_moves_or_is_used_there() -> None:
    state = fleet("pqde")
    full(state, "e", 0.0)
    asked = ask(LOOSE, 9000)
    assert one(state, asked).prefill_only
    uid = request_uid(asked.request_id)
    state.report(msgspec.structs.replace(report("d", 2), draining=True), 0.1)
    state.admit([], 0.11)
    assert state.room.held[uid].replica == "d", "nowhere else is room"
    then = one(state, second(asked), 0.2)
    assert (then.verdict, then.replica, then.reason) == (Verdict.ADMITTED, "d", "attainable")
    state.report(report("e", 300), 0.3)
    assert one(state, other := ask(LOOSE, 9000), 0.3).prefill_only
    assert state.room.held[request_uid(other.request_id)].replica == "e"
    state.report(report("d", 300), 0.4)
    state.report(msgspec.structs.replace(report("e", 400), draining=True), 0.4)
    state.admit([], 0.41)
    assert state.room.held[request_uid(other.request_id)].replica == "d"
    state.check_integrity()


def test_what_is_reserved_on_a_replica_that_falls_silent_moves_or_is_given_up() -> None:
    state = fleet("pqde", silent_s=0.3)
    requests = [ask(LOOSE, 9000) for _ in range(2)]
    for asked in requests:
        assert one(state, asked).prefill_only
    assert {reservation.replica for reservation in state.room.held.values()} == {"d"}
    for name in "pqe":
        state.report(report(name, 2), 0.4)
    state.admit([], 0.41)
    assert {reservation.replica for reservation in state.room.held.values()} == {"e"}
    assert len(state.room.held) == 2
    full(state, "d", 0.8)
    for name in "pq":
        state.report(report(name, 3), 0.8)
    state.admit([], 0.81)
    assert state.room.held == {}, "d has no room"
    state.check_integrity()


def test_prompts_on_a_replica_that_decodes_now_stay_known_when_it_keeps_room_for_others() -> None:
    state = fleet("pqd", prefill=1)
    prompts = [ask(LOOSE, 8000) for _ in range(4)]
    assert {d.replica for d in state.admit(prompts, 0.0)} == {"p"}
    state.phases._phase_of.update(p=Phase.DECODE, q=Phase.PREFILL, d=Phase.DECODE)
    full(state, "d", 0.0)
    others = [ask(LOOSE, 500) for _ in range(6)]
    assert {d.replica for d in state.admit(others, 0.02)} == {"q"}
    assert {state.room.held[request_uid(asked.request_id)].replica for asked in others} == {"p"}
    assert len(state.replicas["p"].table) == len(prompts)
    state.check_integrity()
    kept = {state.room.held[request_uid(asked.request_id)].replica for asked in prompts}
    assert "p" not in kept, "room for a decode is never kept where its own prompt is computed"
