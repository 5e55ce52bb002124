"""The fleet's size: replicas that never come, deploys that reset it, and demand that falls far."""

import math

import pytest
from msgspec.structs import replace

from controller.scaling.allocation import Allocation, AllocationOptions
from controller.scaling.autoscaler import OPTIONS_S, Autoscaler
from controller.scaling.demand import Load
from controller.scaling.history import History
from controller.scaling.role import Kind, ReplicaView
from controller.scaling.roles import DynamicRoles
from controller.scaling.signals import ScalingOptions, Serve, Signals
from tests.support.scaling_cases import H100, World, table


def grown(world: World) -> int:
    """The size that the world's rates take."""
    world.run(200)
    assert world.wanted > 2
    return world.wanted


def test_a_replica_that_never_comes_does_not_hold_the_others_for_ever() -> None:
    options = ScalingOptions(max_replicas=20, start_timeout_s=300.0)
    world = World(options, rates={"tight": 40.0})
    grown(world)
    world.start_s = math.inf  # no node has a GPU left
    world.rates = {"tight": 60.0}
    world.run(60)
    assert any(up_s == math.inf for up_s in world.names.values())
    world.rates = {}
    world.run(200)
    assert not world.removed, "it may still come"
    world.run(1500)
    assert world.wanted == 1
    assert any("did not start within 300 s" in change.reason for change in world.history)


def test_a_replica_without_room_is_cancelled_as_soon_as_demand_can_do_without_it() -> None:
    """Two fleets share a full cluster: one that waits in vain could not shrink, and the other would wait for it."""
    options = ScalingOptions(max_replicas=20, start_timeout_s=9000.0, downscale_delay_s=60.0)
    world = World(options, rates={"tight": 40.0}, is_full=True)
    size = grown(world)
    world.start_s, world.rates = math.inf, {"tight": 80.0}
    world.run(100)
    assert world.scaler.missing.without_room == world.scaler.missing.count > 0
    assert world.wanted > size, "demand takes it: it waits on"
    world.rates = {}
    world.run(400)
    assert world.removed, "its own replicas go to whoever waits for room"
    assert any("found no room within 30 s" in change.reason for change in world.history)


def test_a_replica_that_never_comes_is_waited_for_while_demand_takes_it() -> None:
    world = World(ScalingOptions(max_replicas=20, start_timeout_s=100.0), rates={"tight": 40.0})
    grown(world)
    world.start_s, world.rates = math.inf, {"tight": 80.0}
    world.run(60)
    more = world.wanted
    world.run(1000)
    assert world.wanted >= more


def test_replicas_that_only_fell_silent_are_not_cancelled() -> None:
    world = World(ScalingOptions(max_replicas=20, start_timeout_s=10.0), replicas=4)
    world.run(5)
    world.silent = True
    world.run(3000)
    assert world.wanted == 4


@pytest.mark.parametrize("configured", [2, 9])
def test_a_deploy_that_resets_the_size_is_not_a_size_set_by_hand(configured: int) -> None:
    world = World(ScalingOptions(max_replicas=20, configured=configured), rates={"tight": 40.0})
    automatic = grown(world)
    world.deployed += 1.0
    world.resize(configured)
    world.run(1)
    assert world.wanted == automatic, "what was there is asked for again at once"
    assert world.scaler.held_until_s < world.now_s
    world.rates = {"tight": 120.0}
    world.run(60)
    assert world.wanted > automatic, "and growth is not held"


def test_a_count_set_between_deploys_is_by_hand_also_where_it_is_the_configured_one() -> None:
    world = World(ScalingOptions(max_replicas=20, configured=2), rates={"tight": 40.0})
    grown(world)
    world.resize(2)
    world.run(1)
    assert world.scaler.held_until_s > world.now_s


def test_a_number_that_a_deploy_changes_holds_until_its_options_are_there_and_demand_counts_then() -> None:
    options = ScalingOptions(min_replicas=4, max_replicas=20, configured=4)
    world = World(options, replicas=4, rates={"tight": 40.0})
    automatic = grown(world)
    world.resize(automatic + 1)  # by hand, which a later deploy replaces
    world.run(1)
    world.deployed += 1.0
    world.resize(2)
    world.run(10)
    assert world.wanted == 2, "the minimum of the deploy before is none any more"
    world.scaler.options = replace(options, min_replicas=1, configured=2)
    world.scaler.options_came()
    world.run(60)
    assert world.wanted == pytest.approx(automatic, abs=1), "growth is not held"


def test_a_number_that_a_deploy_raised_shrinks_as_late_as_at_a_start() -> None:
    options = ScalingOptions(max_replicas=20, configured=2, downscale_delay_s=120.0)
    world = World(options, start_s=5.0, rates={"tight": 1.0})
    world.run(500)
    world.deployed += 1.0
    world.resize(8)
    world.run(10)
    world.scaler.options = replace(options, configured=8)
    world.scaler.options_came()
    world.run(110)
    assert (world.wanted, world.roles.names(Kind.DRAINING)) == (8, [])
    world.run(300)
    assert world.wanted < 8


def test_a_deploy_whose_options_never_come_does_not_stop_the_fleet_from_following_demand() -> None:
    world = World(ScalingOptions(max_replicas=20, configured=2), rates={"tight": 40.0})
    automatic = grown(world)
    world.deployed += 1.0
    world.resize(1)
    world.run(int(OPTIONS_S) + 60)
    assert world.wanted >= automatic


def test_a_size_set_by_hand_before_a_deploys_options_come_outlives_them() -> None:
    options = ScalingOptions(max_replicas=20, configured=2)
    world = World(options, rates={"tight": 40.0})
    automatic = grown(world)
    for by_deploy, size in ((1.0, 3), (0.0, 1)):
        world.deployed += by_deploy
        world.resize(size)
        world.run(5)
    world.scaler.options = replace(options, configured=3)
    world.scaler.options_came()
    world.run(30)
    assert world.wanted == 1
    world.deployed += 1.0
    world.scaler.options = replace(options, configured=2)
    world.scaler.options_came()
    world.resize(2)
    world.run(60)
    assert world.wanted >= automatic, "the next deploy's options end the hold, and nothing waits for them"


def test_where_no_options_come_it_shrinks_as_late_as_after_a_start() -> None:
    world = World(ScalingOptions(max_replicas=20, configured=2, downscale_delay_s=50.0), start_s=5.0)
    world.run(200)
    world.deployed += 1.0
    world.resize(8)
    world.run(int(OPTIONS_S) + 40)
    assert (world.wanted, world.roles.names(Kind.DRAINING)) == (8, [])
    world.run(300)
    assert world.wanted < 8


def test_a_size_held_by_hand_outlives_other_options() -> None:
    before, after = (AllocationOptions(scaling=ScalingOptions(max_replicas=most)) for most in (8, 9))
    held = Allocation(before, table())
    views = [ReplicaView("a", (0, 0))]
    held.scale(Serve(1), views, ({}, {}), H100, 0.0)
    held.scale(Serve(3), views, ({}, {}), H100, 1.0)
    held.demand.note(1, "tight", 100, 10, 1.0)
    made = held.under(after, table(), 2.0)
    assert made.autoscaler is not None
    assert made.autoscaler.held_until_s > 500.0
    assert made.demand.loads(2.0).keys() == {"tight"}


def test_where_demand_fell_far_several_go_at_a_time_within_bounds() -> None:
    options = ScalingOptions(max_replicas=40, downscale_delay_s=60.0, downscale_cooldown_s=30.0)
    world = World(options, replicas=40)
    most = 0
    while world.wanted > 2:
        world.run(1)
        draining = world.roles.names(Kind.DRAINING)
        most = max(most, len(draining))
        assert len(draining) <= 0.25 * 40
        assert world.now_s < 60.0 + 12 * 30.0, f"{world.wanted} are left: one per pause takes 19 minutes"
    assert most > 5
    assert sorted(world.removed) == sorted(set(world.removed))
    world.run(300)
    assert world.wanted == 1


def test_of_replicas_that_never_come_those_are_waited_for_that_demand_takes() -> None:
    world = World(ScalingOptions(max_replicas=40, start_timeout_s=100.0), rates={"tight": 40.0})
    grown(world)
    world.start_s, world.rates = math.inf, {"tight": 160.0}
    world.run(120)
    most = world.wanted
    asked = len(world.asked)
    world.rates = {"tight": 100.0}
    world.run(900)
    least = min(world.asked[asked:])
    assert least < most
    assert least >= world.scaler.wanted["tight"]


def test_a_tier_at_its_minimum_gives_no_replica_up_though_it_has_the_least_to_do() -> None:
    """Both of ``tight`` are idle, both of ``loose`` carry a request."""
    views = [ReplicaView(name, (0, int(name in "cd")), load=0.1 * (name in "cd")) for name in "abcd"]
    roles, history = DynamicRoles(table(tight=(2, 0))), History()
    roles.step(views, 0.0)
    assert [roles.role(name).tier for name in "abcd"] == ["tight", "tight", "loose", "loose"]
    scaler = Autoscaler(ScalingOptions(min_replicas=1, max_replicas=9), roles, history)
    signals = Signals(Serve(4), views, {}, {}, H100)
    for now_s in (0.0, 130.0):
        scaler.step(signals, now_s)
    assert roles.names(Kind.DRAINING) == ["c"]


def test_a_drain_that_is_taken_back_again_and_again_comes_later_each_time() -> None:
    views = [ReplicaView(name, (1, 0)) for name in "ab"]  # each with a stream that outlasts the lull
    roles, delay_s = DynamicRoles(table()), 100.0
    roles.step(views, 0.0)
    scaler = Autoscaler(ScalingOptions(max_replicas=9, downscale_delay_s=delay_s), roles, History())
    busy, waits, now_s = {"tight": Load(15.0, 15_000.0, 3_000.0)}, list[float](), 0.0
    for _ in range(4):
        scaler.step(Signals(Serve(2), views, busy, {}, H100), now_s)
        assert roles.names(Kind.DRAINING) == []
        since_s = now_s
        while not roles.names(Kind.DRAINING):
            now_s += 1.0
            scaler.step(Signals(Serve(2), views, {}, {}, H100), now_s)
        waits.append(now_s - since_s)
    assert waits == pytest.approx([delay_s, 2.0 * delay_s, 4.0 * delay_s, 8.0 * delay_s], abs=2.0)


def test_what_a_deploy_reset_is_asked_for_again_up_to_the_maximum() -> None:
    world = World(ScalingOptions(max_replicas=4, configured=1), replicas=2)
    world.run(5)
    world.resize(9)  # by hand, above the maximum
    world.run(40)
    world.asked.clear()
    world.deployed += 1.0
    world.resize(1)
    world.run(2)
    assert world.asked == [4]
