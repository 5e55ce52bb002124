"""Which roles are in force: what the configuration and the tier table together say."""

import msgspec
import numpy as np
import pytest

from controller.scaling.allocation import Allocation, AllocationOptions
from controller.scaling.demand import Hardware
from controller.scaling.role import ReplicaView
from controller.scaling.signals import ScalingOptions, Serve
from controller.scaling.tiers import Tier, TierTable
from controller.shards.share import Share
from profiles.store import load_profile
from tests.support.fleet_cases import H200

PLAIN = TierTable.of(1, [Tier("tight", 1.0, 0.02), Tier("loose", 1.0, 0.1)])
HARDWARE = Hardware(np.array(load_profile(H200).coefficients), 400_000, 0.2)
BOUNDED = TierTable.of(2, [Tier("tight", 1.0, 0.02, min_replicas=1), Tier("loose", 1.0, 0.1)])


@pytest.mark.parametrize("scaling", [None, ScalingOptions(max_replicas=4)])
def test_a_bound_turns_roles_on_in_place_and_its_end_turns_them_off(scaling: ScalingOptions | None) -> None:
    allocation = Allocation(AllocationOptions(scaling=scaling), PLAIN)
    for table, is_dynamic in ((PLAIN, False), (BOUNDED, True), (PLAIN, False)):
        allocation.set_table(table, 0.0)
        assert allocation.is_dynamic == is_dynamic
        assert allocation.autoscaler is None or allocation.autoscaler.roles is allocation.roles


@pytest.mark.parametrize("roles", ["static", "dynamic"])
def test_roles_that_are_stated_stay(roles: str) -> None:
    for table in (PLAIN, BOUNDED):
        assert Allocation(AllocationOptions(roles), table).is_dynamic == (roles == "dynamic")


def sized(options: AllocationOptions) -> Allocation:
    """A fleet whose size was set by hand, from 2 to 6."""
    allocation = Allocation(options, PLAIN)
    for now_s, count in ((0.0, 2), (1.0, 6)):
        views = [ReplicaView(f"g/{k}", (0, 0)) for k in range(count)]
        allocation.scale(Serve(count, count, 1.0), views, ({}, {}), HARDWARE, now_s)
    assert allocation.autoscaler is not None
    assert allocation.autoscaler.target == 6
    return allocation


@pytest.mark.parametrize("delay_s", [100.0, 200.0])
def test_a_deploy_of_other_options_resets_neither_the_size_nor_the_hold(delay_s: float) -> None:
    scaling = ScalingOptions(1, 40, "g", configured=2, downscale_delay_s=100.0)
    allocation = sized(AllocationOptions(scaling=scaling))
    changed = AllocationOptions(scaling=msgspec.structs.replace(scaling, downscale_delay_s=delay_s))
    held_until_s = allocation.autoscaler.held_until_s if allocation.autoscaler else 0.0
    deployed = allocation.under(changed, PLAIN, 2.0)
    actions = deployed.scale(Serve(2, 2, 2.0), [ReplicaView("g/0", (0, 0))], ({}, {}), HARDWARE, 3.0)
    assert actions.replicas == 6
    assert deployed.autoscaler is not None
    assert (deployed.autoscaler.held_until_s, deployed.autoscaler.options.downscale_delay_s) == (held_until_s, delay_s)


def test_a_deploy_that_states_another_size_gets_that() -> None:
    scaling = ScalingOptions(1, 40, "g", configured=2)
    allocation = sized(AllocationOptions(scaling=scaling))
    deployed = allocation.under(AllocationOptions(scaling=msgspec.structs.replace(scaling, configured=3)), PLAIN, 2.0)
    views = [ReplicaView(f"g/{k}", (0, 0)) for k in range(3)]
    assert deployed.scale(Serve(3, 3, 2.0), views, ({}, {}), HARDWARE, 3.0).replicas is None
    assert deployed.autoscaler is not None
    assert deployed.autoscaler.target == 3
    assert deployed.autoscaler.held_until_s < 0.0, "what was set by hand before is replaced"


def test_who_comes_to_lead_several_controllers_leaves_it_to_itself_as_their_leader() -> None:
    allocation = Allocation(AllocationOptions(scaling=ScalingOptions(1, 40, "g", configured=4)), PLAIN)
    assert allocation.autoscaler is not None
    assert allocation.autoscaler.undoes_resets
    allocation.set_share(Share(0, 2), 1.0)
    assert not allocation.autoscaler.undoes_resets


def test_several_controllers_leave_what_a_deploy_resets_to_their_leader() -> None:
    scaling = ScalingOptions(1, 40, "g", configured=4)
    allocation = Allocation(AllocationOptions(scaling=scaling), PLAIN, share=Share(0, 2))
    views = [ReplicaView(f"g/{k}", (0, 0)) for k in range(4)]
    for serve in (Serve(2, 2, 1.0), Serve(4, 2, 2.0)):  # its part of 4, then of the 8 of another deploy
        assert allocation.scale(serve, views, ({}, {}), HARDWARE, serve.deployed).replicas is None
    assert allocation.autoscaler is not None
    assert allocation.autoscaler.target == 4


@pytest.mark.parametrize("is_deploy", [True, False])
def test_what_drains_goes_on_draining_under_other_roles(is_deploy: bool) -> None:
    allocation = sized(AllocationOptions(scaling=ScalingOptions(1, 40, "g", configured=2)))
    assert allocation.autoscaler is not None
    held_until_s = allocation.autoscaler.held_until_s
    allocation.step([ReplicaView(f"g/{k}", (0, 0)) for k in range(6)], 1.0)
    allocation.roles.drain("g/3", 1.0, "a test")
    if is_deploy:
        options = AllocationOptions(idle_s=9.0, scaling=allocation.options.scaling)
        allocation = allocation.under(options, BOUNDED, 2.0)
    else:
        allocation.set_table(BOUNDED, 2.0)
    assert allocation.is_dynamic
    assert set(allocation.draining) == {"g/3"}
    assert allocation.autoscaler is not None
    assert (allocation.autoscaler.held_until_s, allocation.autoscaler.target) == (held_until_s, 6)
    assert allocation.autoscaler.roles is allocation.roles


@pytest.mark.parametrize("is_deploy", [True, False])
def test_replicas_get_their_tiers_by_the_new_order_also_while_one_drains(is_deploy: bool) -> None:
    """Their requests were told by positions in the table before: what was the tightest tier is the loosest now."""
    allocation = sized(AllocationOptions(scaling=ScalingOptions(1, 40, "g", configured=2)))
    allocation.step([ReplicaView("g/0", (1, 0)), ReplicaView("g/1", (0, 1)), ReplicaView("g/2", (1, 0))], 1.0)
    allocation.roles.drain("g/2", 1.0, "a test")
    turned = TierTable.of(2, [Tier("loose", 1.0, 0.02, min_replicas=1), Tier("tight", 1.0, 0.1)])
    if is_deploy:
        allocation = allocation.under(AllocationOptions(idle_s=9.0, scaling=allocation.options.scaling), turned, 2.0)
    else:
        allocation.set_table(turned, 2.0)
    allocation.step([ReplicaView("g/0", (0, 1)), ReplicaView("g/1", (1, 0)), ReplicaView("g/2", (0, 1))], 2.0)
    assert [allocation.roles.told(f"g/{k}")[1] for k in range(3)] == ["tight", "loose", "draining"]


@pytest.mark.parametrize("changed", [{"downscale_cooldown_s": 7.0}, {"drain_timeout_s": 50.0}])
def test_what_drains_has_drained_since_it_began_whatever_options_come(changed: dict[str, float]) -> None:
    scaling = ScalingOptions(1, 40, "g", configured=2, drain_timeout_s=100.0, manual_hold_s=5.0, downscale_delay_s=1.0)
    allocation = sized(AllocationOptions(scaling=scaling))
    views = [ReplicaView(f"g/{k}", (0, 0), best_effort=1) for k in range(6)]
    drained_s, ended_s = 0.0, 0.0
    for now_s in map(float, range(2, 200)):
        if now_s == 50.0:
            options = AllocationOptions(scaling=msgspec.structs.replace(scaling, **changed))
            allocation = allocation.under(options, PLAIN, now_s)
        allocation.step(views, now_s)
        actions = allocation.scale(Serve(6, 6, 1.0), views, ({}, {}), HARDWARE, now_s)
        drained_s = drained_s or now_s * bool(allocation.draining)
        ended_s = ended_s or now_s * bool(actions.remove)
    assert 0.0 < drained_s < 50.0
    assert ended_s == drained_s + changed.get("drain_timeout_s", 100.0)


@pytest.mark.parametrize("scaling", [None, ScalingOptions(1, 40, "h", configured=2)])
def test_what_drains_serves_again_where_no_autoscaler_would_end_it(scaling: ScalingOptions | None) -> None:
    allocation = sized(AllocationOptions(scaling=ScalingOptions(1, 40, "g", configured=2)))
    allocation.step([ReplicaView(f"g/{k}", (0, 0)) for k in range(6)], 1.0)
    allocation.roles.drain("g/3", 1.0, "a test")
    allocation = allocation.under(AllocationOptions(scaling=scaling), PLAIN, 2.0)
    allocation.step([ReplicaView(f"g/{k}", (0, 0)) for k in range(6)], 2.0)
    assert not allocation.draining
    assert allocation.is_open("g/3")


@pytest.mark.parametrize("before", [None, ScalingOptions(1, 3, "g", configured=3)])
@pytest.mark.parametrize("after", [None, ScalingOptions(1, 4, "g", configured=3)])
def test_replicas_stay_in_their_tiers_when_other_options_come(
    before: ScalingOptions | None, after: ScalingOptions | None
) -> None:
    def views(*carried: tuple[int, int]) -> list[ReplicaView]:
        return [ReplicaView(f"g/{k}", each) for k, each in enumerate(carried)]

    allocation = Allocation(AllocationOptions("dynamic", scaling=before), PLAIN)
    allocation.step(views((1, 0), (0, 1), (1, 0)), 0.0)
    idle = views((0, 1), (0, 1), (0, 0))  # for a moment nobody asks for the tight tier
    allocation.step(idle, 1.0)
    allocation.roles.shares = {"tight": 1}
    told = len(allocation.history)
    made = allocation.under(AllocationOptions("dynamic", idle_s=7.0, scaling=after), BOUNDED, 1.1)
    made.step(idle, 1.1)
    assert [made.tier(view.name) for view in idle] == [0, 1, 0]
    assert len(allocation.history) == told
    assert made.autoscaler is None or made.autoscaler.roles is made.roles
    assert made.roles.shares == {}, "an autoscaler of other options tells its own"
    made.step(idle, 7.9)
    assert [made.tier(view.name) for view in idle] == [0, 1, 0]
    made.step(idle, 8.1)
    assert [made.tier(view.name) for view in idle].count(0) == 1, "its time without a request is the new one"


@pytest.mark.parametrize("before", [None, ScalingOptions(max_replicas=4, look_back_period_s=20.0)])
def test_demand_is_measured_over_the_period_of_the_latest_options(before: ScalingOptions | None) -> None:
    allocation = Allocation(AllocationOptions(scaling=before), PLAIN)
    after = ScalingOptions(max_replicas=4, look_back_period_s=60.0)
    allocation.demand.note(1, "tight", 100, 10, 0.0)
    made = allocation.under(AllocationOptions(scaling=after), PLAIN, 1.0)
    assert made.demand.loads(55.0).keys() == {"tight"}
    assert not made.demand.loads(61.0)
