"""The fleet with dynamic roles: who is called up for whom, and that promises outlive every change."""

import itertools
from collections.abc import Iterable

import msgspec
import pytest

from controller.fleet import Fleet
from controller.options import FleetOptions
from controller.scaling.allocation import AllocationOptions
from controller.scaling.signals import Actions, ScalingOptions, Serve
from controller.scaling.sizing import hardware_of, plan_size
from controller.scaling.tiers import Tier, TierTable
from controller.status import fleet_status
from profiles.store import load_profile
from protocol.messages import AdmissionRequest, Decision, Progress, Report, Slo, Verdict, request_uid

H200 = "h200_sxm__llama-3.1-8b"
TIGHT, LOOSE, FLEX = Slo(0.3, 0.03, tier="tight"), Slo(3.0, 0.1, tier="loose"), Slo(tier="flex", best_effort=True)
counter = itertools.count()


def table(version: int = 1, tight: tuple[int, int] = (0, 0), loose: tuple[int, int] = (0, 0)) -> TierTable:
    return TierTable.of(
        version,
        [
            Tier("tight", 0.3, 0.03, min_replicas=tight[0], max_replicas=tight[1]),
            Tier("loose", 3.0, 0.1, min_replicas=loose[0], max_replicas=loose[1]),
            Tier("flex", best_effort=True),
        ],
    )


def fleet(names: str = "abc", tiers: TierTable | None = None, scaling: ScalingOptions | None = None) -> Fleet:
    allocation = AllocationOptions("dynamic", idle_s=2.0, scaling=scaling)
    state = Fleet(FleetOptions(length_prior_tokens=100.0, allocation=allocation), tiers or table(), load_profile)
    tell(state, names, 0.0)
    return state


def tell(state: Fleet, names: Iterable[str], now_s: float, **requests: list[Progress]) -> None:
    """Every replica reports these requests and no other."""
    for name in names:
        held = tuple(requests.get(name, ()))
        state.report(Report(name, "1", int(now_s * 100) + 1, H200, 400_000, 0, 256, 8192, 0.0, held), now_s)


def ask(slo: Slo, prompt_tokens: int = 500) -> AdmissionRequest:
    return AdmissionRequest(f"r{next(counter)}", prompt_tokens, 200, slo)


def running(slo: Slo, name: str = "") -> Progress:
    return Progress(name or f"p{next(counter)}", slo, 0.1, 500, 505, 6, 100, 200, True)


def roles(state: Fleet) -> dict[str, str]:
    return {each["replica"]: each["role"] for each in fleet_status(state, 0.0)["replicas"]}


def one(state: Fleet, slo: Slo, now_s: float = 0.0, prompt_tokens: int = 500) -> Decision:
    (decision,) = state.admit([ask(slo, prompt_tokens)], now_s)
    return decision


def test_the_first_request_of_a_tier_calls_a_replica_up_and_the_next_ones_follow_it() -> None:
    state = fleet()
    first, second = one(state, TIGHT), one(state, TIGHT)
    assert first.verdict == second.verdict == Verdict.ADMITTED
    assert first.replica == second.replica
    assert sorted(roles(state).values()) == ["pool", "pool", "tight"]


def test_a_loose_request_is_promoted_to_a_tighter_replica_with_room_before_the_pool_is_asked() -> None:
    state = fleet()
    tight, loose = one(state, TIGHT), one(state, LOOSE)
    assert loose.replica == tight.replica
    assert loose.tier == "loose", "the request stays what it was"
    assert (tight.is_promoted, loose.is_promoted) == (False, True)


def test_its_own_tier_comes_first() -> None:
    state = fleet(tiers=table(tight=(1, 0), loose=(1, 0)))
    assert roles(state) == {"a": "tight", "b": "loose", "c": "pool"}
    assert [one(state, slo).replica for slo in (LOOSE, TIGHT, LOOSE)] == ["b", "a", "b"]


def test_a_burst_calls_up_as_many_as_it_takes_and_best_effort_keeps_the_rest() -> None:
    state = fleet("abcdef")
    decisions = state.admit([ask(TIGHT, 2500) for _ in range(12)], 0.0)
    admitted = [decision for decision in decisions if decision.verdict == Verdict.ADMITTED]
    called = {decision.replica for decision in admitted}
    assert len(called) > 1
    assert {name for name, role in roles(state).items() if role == "tight"} == called
    state.check_integrity()


def test_a_maximum_is_kept_although_the_pool_has_more() -> None:
    state = fleet("abcdef", table(tight=(0, 2)))
    decisions = state.admit([ask(TIGHT, 2500) for _ in range(40)], 0.0)
    assert list(roles(state).values()).count("tight") == 2
    assert any(decision.verdict != Verdict.ADMITTED for decision in decisions)


def test_what_no_replica_could_do_moves_none() -> None:
    state = fleet()
    decision = one(state, Slo(0.001, 0.03, tier="tight"), prompt_tokens=4000)
    assert decision.verdict != Verdict.ADMITTED
    assert set(roles(state).values()) == {"pool"}


def test_best_effort_work_stays_on_a_replica_that_is_called_up_and_gives_way() -> None:
    state = fleet("a")
    tell(state, "a", 1.0, a=[running(FLEX) for _ in range(4)])
    assert one(state, TIGHT, 1.0).replica == "a"
    assert roles(state) == {"a": "tight"}
    assert fleet_status(state, 1.0)["replicas"][0]["best_effort"] == 4


def test_best_effort_prefers_the_pool() -> None:
    state = fleet(tiers=table(tight=(1, 0), loose=(1, 0)))
    assert one(state, FLEX).replica == "c"


def test_a_tier_that_is_done_gives_its_replica_back_over_the_pending_list() -> None:
    state = fleet("a")
    one(state, TIGHT)
    loose = [running(LOOSE)]
    for now_s in (4.0, 5.0, 6.5):
        tell(state, "a", now_s, a=loose)
    assert roles(state) == {"a": "pending (tight)"}
    assert one(state, LOOSE, 6.5).replica == "a", "the tier of what it carries takes it with its requests"
    assert roles(state) == {"a": "loose"}
    for now_s in (10.0, 12.5, 15.0):
        tell(state, "a", now_s)
    assert roles(state) == {"a": "pool"}


def test_where_the_first_candidate_refuses_the_next_one_joins() -> None:
    state = fleet("ab")
    assert one(state, TIGHT).replica == "a"
    full = [running(LOOSE) for _ in range(256)]  # as many as it may run
    for now_s in (4.0, 5.0, 6.5):
        tell(state, "ab", now_s, a=full)
    assert roles(state) == {"a": "pending (tight)", "b": "pool"}
    assert one(state, LOOSE, 6.5).replica == "b"
    assert roles(state) == {"a": "pending (tight)", "b": "loose"}


def test_a_candidate_that_the_request_excludes_is_passed_over() -> None:
    state = fleet("ab")
    (decision,) = state.admit([msgspec.structs.replace(ask(TIGHT), exclude=("a",))], 0.0)
    assert decision.verdict == Verdict.ADMITTED
    assert decision.replica == "b"


def test_a_resize_moves_replicas_with_the_requests_they_carry_and_loses_none() -> None:
    state = fleet("abc", table(loose=(3, 0)))
    decisions = [one(state, LOOSE) for _ in range(4)]
    assert state.set_tiers(table(2, tight=(2, 0), loose=(1, 0)), 0.1)
    assert sorted(roles(state).values()) == ["loose", "tight", "tight"]
    held = {uid for replica in state.replicas.values() for uid in replica.table["id"].tolist()}
    assert held == {request_uid(decision.request_id) for decision in decisions}
    state.check_integrity()


def test_requests_of_a_removed_tier_belong_to_the_next_tighter_one() -> None:
    state = fleet("ab")
    tell(state, "ab", 1.0, a=[running(LOOSE), running(LOOSE)])
    one(state, LOOSE, 1.0)
    without = TierTable.of(2, [tier for tier in table().tiers if tier.name != "loose"])
    state.set_tiers(without, 1.1)
    assert [view.slo_requests for view in state.views(1.1) if any(view.slo_requests)] == [(3,)]
    tell(state, "ab", 2.0, a=[running(LOOSE)])
    assert state.views(2.0)[0].slo_requests == (2,), "reported under the tier of old, and one not reported yet"
    assert one(state, LOOSE, 2.0).tier == "tight", "one that asked before and is answered now"
    reasons = [change["reason"] for change in fleet_status(state, 2.0)["allocation"]["history"]]
    assert "tier table version 2" in reasons


def test_stating_bounds_turns_roles_dynamic_in_place_and_leaving_them_out_static_again() -> None:
    state = Fleet(FleetOptions(), table(), load_profile)
    tell(state, "ab", 0.0)
    assert roles(state) == {"a": "shared", "b": "shared"}
    state.set_tiers(table(2, tight=(1, 0)), 1.0)
    assert sorted(roles(state).values()) == ["pool", "tight"]
    state.set_tiers(table(3), 2.0)
    assert roles(state) == {"a": "shared", "b": "shared"}


def test_other_options_keep_the_roles() -> None:
    state = fleet("ab")
    one(state, TIGHT)
    before = roles(state)
    other = Fleet(FleetOptions(max_hops=9, allocation=state.options.allocation), table(2), load_profile)
    other.adopt_state(state, 1.0)
    assert roles(other) == before


def test_a_drained_replica_takes_nothing_and_is_removed_when_empty() -> None:
    state = fleet("abc", scaling=ScalingOptions(max_replicas=4, downscale_delay_s=10.0, downscale_cooldown_s=5.0))
    for now_s in range(1, 12):
        tell(state, "abc", float(now_s), a=[running(TIGHT, "stream")])
        actions = plan_size(state, Serve(3), float(now_s))
    assert actions == Actions(remove=("b",)), "empty, and drained a moment ago"
    assert roles(state)["b"] == "draining"
    assert {one(state, FLEX, 11.0).replica for _ in range(6)} == {"a", "c"}


@pytest.mark.parametrize("serve", [None, Serve(3)])
def test_a_fleet_of_fixed_size_is_left_alone(serve: Serve | None) -> None:
    assert plan_size(fleet("abc"), serve, 1000.0) == Actions()


def test_the_size_grows_by_what_is_asked_in_the_models_terms() -> None:
    state = fleet("a", scaling=ScalingOptions(max_replicas=8))
    assert plan_size(state, Serve(1), 0.5) == Actions()
    state.admit([ask(TIGHT, 4000) for _ in range(80)], 1.0)
    assert (plan_size(state, Serve(1), 1.0).replicas or 0) > 2
    hardware = hardware_of(state, "", 1.0)
    assert hardware is not None
    assert hardware.coefficients.tolist() == load_profile(H200).coefficients.tolist()
    assert hardware_of(state, "gpus", 1.0) is None


def test_drafts_count_by_what_replicas_accept_in_the_mean() -> None:
    state = fleet("ab")
    for replica, acceptance in zip(state.replicas.values(), (0.2, 0.8), strict=True):
        replica.limits["acceptance"] = acceptance
    hardware = hardware_of(state, "", 1.0)
    assert hardware is not None
    assert hardware.acceptance == pytest.approx(0.5)


def grouped(*names: str) -> Fleet:
    """A fleet of groups of which ``h`` follows the load."""
    options = ScalingOptions(max_replicas=8, group="h", downscale_delay_s=10.0, downscale_cooldown_s=5.0)
    state = fleet("", scaling=options)
    tell(state, names, 0.0)
    return state


def test_a_group_of_which_none_is_left_grows_again_by_demand() -> None:
    state, others = grouped("h/1", "o/1", "o/2"), ("o/1", "o/2")
    assert plan_size(state, Serve(3), 0.0) == Actions()
    tell(state, ("h/1", *others), 12.0)
    assert plan_size(state, Serve(3), 12.0) == Actions(remove=("h/1",)), "a quiet spell"
    state.on_removed("h/1", 12.0)
    asked = []
    for now_s in range(13, 44):
        tell(state, others, float(now_s))
        state.admit([ask(LOOSE, 4000) for _ in range(100)], float(now_s))
        actions = plan_size(state, Serve(2), float(now_s))
        asked.append(actions.replicas or 0)
    assert max(asked) > 3, "as many as the demand takes, not one to begin with"


def test_a_group_that_was_never_seen_gets_one_replica_to_begin_with_while_anything_is_asked() -> None:
    state = grouped("o/1", "o/2")
    assert plan_size(state, Serve(2), 0.0) == Actions(), "nobody asks"
    state.admit([ask(LOOSE, 4000) for _ in range(100)], 1.0)
    assert plan_size(state, Serve(2), 1.0) == Actions(replicas=3)
    assert plan_size(state, Serve(3), 1.4) == Actions(), "it is starting"
    tell(state, ("o/1", "o/2"), 20.0)
    assert plan_size(state, Serve(3), 20.0) == Actions(), "however long that takes"


def test_best_effort_waits_for_a_fleet_that_was_scaled_to_zero() -> None:
    state = fleet("", scaling=ScalingOptions(min_replicas=0, max_replicas=2))
    assert one(state, FLEX).verdict == Verdict.PENDING
    assert plan_size(state, Serve(0), 0.1) == Actions(replicas=1)
    assert one(state, TIGHT).reason == "no_replica"
    fixed = fleet("")
    assert one(fixed, FLEX).verdict == Verdict.REFUSED


@pytest.mark.parametrize("is_seen", [True, False])
def test_a_bounded_tier_takes_another_replica_soon_after_its_own_was_seen_to_die(is_seen: bool) -> None:
    state = fleet("abc", table(tight=(0, 1)))
    dead = state.admit([ask(TIGHT)], 0.0)[0].replica
    others = sorted({"a", "b", "c"} - {dead})
    if is_seen:
        state.on_failed(dead, 0.1)
    for tick in range(1, 9):
        tell(state, others, 0.5 * tick)
    assert (dead in state.replicas) != is_seen, "silence alone is no death: missing news are no news"
    assert (state.admit([ask(TIGHT)], 4.0)[0].verdict == Verdict.ADMITTED) == is_seen
    tell(state, "abc", 5.0)
    assert dead in state.replicas, "it lives, as a new one"
    state.check_integrity()
