"""Replicas move between tiers, the pending list and the pool by the rules of PolyServe sections 4.3 and 4.4."""

from typing import Any

from controller.scaling.history import KEPT
from controller.scaling.role import Kind, ReplicaView
from controller.scaling.roles import DynamicRoles, RoleOptions
from controller.scaling.tiers import Tier, TierTable

TIGHT, MIDDLE, LOOSE = 0, 1, 2
POOL = 3


def table(version: int = 1, **bounds: tuple[int, int]) -> TierTable:
    tiers = [Tier("tight", 0.3, 0.02), Tier("middle", 1.0, 0.05), Tier("loose", 3.0, 0.1)]
    lows: dict[str, dict[str, Any]] = {
        name: {"min_replicas": low, "max_replicas": high} for name, (low, high) in bounds.items()
    }
    told = [Tier(t.name, t.ttft_s, t.tpot_s, **lows.get(t.name, {})) for t in tiers]
    return TierTable.of(version, [*told, Tier("batch", best_effort=True, **lows.get("batch", {}))])


def view(name: str, *counts: int, best_effort: int = 0, load: float = 0.0, is_reporting: bool = True) -> ReplicaView:
    return ReplicaView(name, (*counts, *(0,) * (POOL - len(counts))), best_effort, load, is_reporting)


def idle(names: str) -> list[ReplicaView]:
    return [view(name) for name in names]


def roles(names: str = "abcd", **bounds: tuple[int, int]) -> DynamicRoles:
    state = DynamicRoles(table(1, **bounds), RoleOptions(idle_s=5.0))
    state.step(idle(names), 0.0)
    return state


def claim(roles: DynamicRoles, position: int, views: list[ReplicaView], now_s: float) -> str | None:
    """What placement does where a tier has no room and the first candidate can promise what is asked."""
    chosen = next(iter(roles.candidates(position, views)), None)
    if chosen is not None:
        roles.join(chosen, position, now_s)
    return chosen


def test_replicas_join_the_pool_and_minimums_take_theirs_tightest_first() -> None:
    state = roles("abcd", tight=(1, 0), loose=(2, 0))
    assert [state.position(name) for name in "abcd"] == [TIGHT, LOOSE, LOOSE, POOL]
    assert state.history.to_builtins(1.0)[0]["reason"] == "minimum of loose: 2"


def test_a_tier_without_room_takes_from_the_pool_at_once_and_up_to_its_maximum() -> None:
    state = roles("abcd", tight=(0, 2))
    assert claim(state, TIGHT, idle("abcd"), 1.0) == "a"
    assert claim(state, TIGHT, idle("abcd"), 1.0) == "b"
    assert claim(state, TIGHT, idle("abcd"), 1.0) is None, "its maximum"
    assert state.count(TIGHT) == 2


def test_the_replica_with_the_least_best_effort_work_joins() -> None:
    views = [view("a", best_effort=5), view("b", best_effort=1)]
    assert claim(roles("ab"), LOOSE, views, 0.0) == "b"


def test_what_minimums_are_owed_is_not_taken_by_others() -> None:
    state = roles("ab", batch=(1, 0))
    assert claim(state, TIGHT, idle("ab"), 0.0) == "a"
    assert claim(state, TIGHT, idle("ab"), 0.0) is None, "the last one is best effort's"


def test_an_idle_replica_leaves_its_tier_only_after_a_while_and_never_below_the_minimum() -> None:
    state = roles("ab", tight=(1, 0))
    claim(state, TIGHT, idle("ab"), 0.0)
    state.step(idle("ab"), 1.0)
    assert state.count(TIGHT) == 2
    state.step([view("a", 1), view("b")], 5.9)
    assert state.count(TIGHT) == 2, "idle for 4.9 s"
    state.step(idle("ab"), 6.0)
    assert [state.role(name).kind for name in "ab"] == [Kind.SERVES, Kind.POOL], "a served a moment ago"
    state.step(idle("ab"), 60.0)
    assert state.count(TIGHT) == 1


def test_kept_busy_by_a_looser_tier_only_it_waits_on_the_pending_list() -> None:
    state = roles("ab")
    claim(state, TIGHT, idle("ab"), 0.0)
    carrying = [view("a", 0, 0, 3, load=0.4), view("b")]
    state.step(carrying, 0.0)
    state.step(carrying, 5.0)
    assert str(state.role("a")) == "pending (tight)"
    assert state.position("a") == POOL, "no SLO request is sent to it"
    state.step(idle("ab"), 6.0)
    assert state.role("a").kind == Kind.POOL, "empty"


def test_the_tier_of_its_requests_takes_a_pending_replica_with_them_before_any_from_the_pool() -> None:
    state = roles("ab")
    claim(state, TIGHT, idle("ab"), 0.0)
    carrying = [view("a", 0, 0, 3, load=0.4), view("b")]
    for now_s in (0.0, 5.0):
        state.step(carrying, now_s)
    assert claim(state, LOOSE, carrying, 6.0) == "a"
    assert claim(state, LOOSE, carrying, 6.0) == "b"


def test_a_replica_never_joins_a_tier_looser_than_what_it_carries() -> None:
    state = roles("a", tight=(0, 1), loose=(0, 0))
    claim(state, TIGHT, idle("a"), 0.0)
    state.set_table(table(2, tight=(0, 0), loose=(1, 0)), 0.0)
    carrying = [view("a", 1, 0, 0)]
    for now_s in (0.0, 5.0, 10.0):
        state.step(carrying, now_s)
    assert state.position("a") == POOL, "given up by its tier, not yet by its request"
    assert claim(state, LOOSE, carrying, 10.0) is None
    state.step(idle("a"), 11.0)
    assert state.position("a") == LOOSE


def test_a_raised_minimum_is_filled_from_tiers_above_theirs_with_the_requests_they_carry() -> None:
    state = roles("abc")
    for _ in range(3):
        claim(state, LOOSE, idle("abc"), 0.0)
    state.set_table(table(2, tight=(2, 0), loose=(1, 0)), 1.0)
    state.step([view("a", 0, 0, 9, load=0.9), view("b", 0, 0, 2, load=0.2), view("c", 0, 0, 1, load=0.1)], 1.0)
    assert [state.position(name) for name in "abc"] == [LOOSE, TIGHT, TIGHT], "the least loaded ones"


def test_a_lowered_maximum_takes_the_least_loaded_out() -> None:
    state = roles("ab")
    for _ in range(2):
        claim(state, TIGHT, idle("ab"), 0.0)
    state.set_table(table(2, tight=(0, 1)), 1.0)
    state.step([view("a", 4, load=0.5), view("b", 1, load=0.1)], 1.0)
    assert [str(state.role(name)) for name in "ab"] == ["tight", "pending (tight)"]


def test_replicas_of_a_removed_tier_serve_the_next_tighter_one() -> None:
    state = roles("ab")
    claim(state, LOOSE, idle("ab"), 0.0)
    shorter = TierTable.of(2, [tier for tier in table().tiers if tier.name != "loose"])
    state.set_table(shorter, 1.0)
    assert str(state.role("a")) == "middle"
    assert list(state.history)[-1].reason == "tier loose was removed"
    state.check_integrity()


def test_a_silent_replica_keeps_its_role_and_takes_no_other() -> None:
    state = roles("ab")
    claim(state, TIGHT, idle("ab"), 0.0)
    silent = [view("a", is_reporting=False), view("b", is_reporting=False)]
    state.step(silent, 100.0)
    assert state.position("a") == TIGHT
    assert claim(state, LOOSE, silent, 100.0) is None


def test_a_reborn_controller_takes_roles_from_what_replicas_carry() -> None:
    state = DynamicRoles(table())
    state.step([view("a", 0, 2, 1), view("b", best_effort=3), view("c", 0, 0, 1)], 0.0)
    assert [state.position(name) for name in "abc"] == [MIDDLE, POOL, LOOSE]


def test_a_draining_replica_takes_nothing_until_it_is_taken_back() -> None:
    state = roles("ab")
    state.drain("a", 1.0, "demand takes less")
    assert not state.is_open("a")
    assert claim(state, TIGHT, idle("a"), 1.0) is None
    assert state.restore("a", idle("ab"), 2.0, "demand came back")
    assert not state.restore("b", idle("ab"), 2.0, "was not draining")
    assert state.is_open("a")


def test_shares_bound_a_tier_while_tiers_compete() -> None:
    state = roles("abc")
    state.shares = {"tight": 1}
    assert claim(state, TIGHT, idle("abc"), 0.0) == "a"
    assert claim(state, TIGHT, idle("abc"), 0.0) is None
    assert claim(state, LOOSE, idle("abc"), 0.0) == "b"


def test_a_tier_served_now_and_then_keeps_its_replica_without_flapping() -> None:
    state = roles("ab")
    claim(state, TIGHT, idle("ab"), 0.0)
    changes = len(state.history)
    for second in range(200):
        state.step([view("a", second // 2 % 2), view("b")], float(second))
    assert len(state.history) == changes


def test_history_is_bounded_and_newest_first() -> None:
    state = roles("a")
    for second in range(600):
        state.drain("a", second, "out")
        state.restore("a", idle("a"), second, "back")
    told = state.history.to_builtins(600.0)
    assert len(told) == KEPT
    assert told[0] == {"age_s": 1.0, "what": "a", "before": "draining", "after": "pool", "reason": "back"}


def test_a_minimum_that_is_idle_rests() -> None:
    """It must not leave its tier and be called back at every step."""
    state = roles("a", tight=(1, 0))
    changes = len(state.history)
    for second in range(20):
        state.step(idle("a"), float(second))
    assert len(state.history) == changes


def test_of_equals_the_replica_that_once_was_of_the_tier_joins_it() -> None:
    state = roles("ab")
    state.join("b", TIGHT, 0.0)
    carrying = [view("a"), view("b", 0, 0, 3, best_effort=2)]
    for now_s in (0.0, 5.0):
        state.step(carrying, now_s)
    assert str(state.role("b")) == "pending (tight)"
    assert claim(state, TIGHT, carrying, 6.0) == "b"


def test_one_replica_on_its_way_is_enough_for_a_minimum_of_one() -> None:
    state = roles("ab")
    for _ in range(2):
        claim(state, TIGHT, idle("ab"), 0.0)
    state.set_table(table(2, loose=(1, 0)), 1.0)
    for second in range(1, 5):
        state.step([view("a", 1), view("b", 1)], float(second))
    assert state.count(TIGHT) == 1, "what the other carries is too tight still, so it waits"
