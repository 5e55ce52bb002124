"""The fleet's size follows the load; one test for each thing that users of autoscalers complain of."""

import numpy as np
import pytest

from controller.scaling.autoscaler import Autoscaler
from controller.scaling.demand import Load
from controller.scaling.history import History
from controller.scaling.role import Kind, ReplicaView
from controller.scaling.roles import DynamicRoles
from controller.scaling.signals import Actions, ScalingOptions, Serve, Signals
from controller.scaling.tiers import Tier, TierTable
from tests.support.scaling_cases import H100, World, table


def test_it_grows_with_the_load_and_shrinks_after_it() -> None:
    world = World(ScalingOptions(min_replicas=1, max_replicas=10), rates={"tight": 60.0})
    world.run(120)
    grown = world.wanted
    assert grown > 2
    assert len(world.views()) == grown
    world.rates = {}
    world.run(140)
    assert world.wanted > 1, "late, and one after the other"
    world.run(1000)
    assert world.wanted == 1
    assert len(world.removed) == grown - 1


@pytest.mark.parametrize("rate", [5.0, 17.0, 23.0, 31.0, 44.0, 60.0])
def test_constant_load_does_not_flap(rate: float) -> None:
    world = World(ScalingOptions(min_replicas=1, max_replicas=30), rates={"tight": rate, "loose": rate / 2})
    world.run(300)
    settled = len(world.sizes())
    world.run(1500)
    later = world.sizes()[settled:]
    assert len(later) <= 2, f"{later}: a rare peak of random arrivals at most, and back"


def test_it_stays_at_its_minimum_when_reports_stop() -> None:
    world = World(ScalingOptions(min_replicas=2, max_replicas=10), replicas=4, rates={"tight": 30.0})
    world.run(200)
    before, removed = world.wanted, len(world.removed)
    world.silent, world.rates = True, {}
    world.run(2000)
    assert world.wanted == before, "no shrinking on missing reports"
    assert len(world.removed) == removed
    world.can_tell = False
    assert world.step() == Actions()


def test_minimums_hold_without_any_load_or_report() -> None:
    world = World(ScalingOptions(min_replicas=1, max_replicas=10), table(tight=(2, 0), loose=(1, 0)), replicas=1)
    world.silent = True
    world.run(1)
    assert world.wanted == 3, "the sum of the tiers' minimums"
    world.silent = False
    world.run(1000)
    assert world.wanted == 3
    assert isinstance(world.roles, DynamicRoles)
    assert [world.roles.count(position) for position in (0, 1)] == [2, 1]


def test_the_budget_holds_while_tiers_compete() -> None:
    world = World(ScalingOptions(min_replicas=1, max_replicas=6), table(tight=(1, 0), loose=(1, 0)))
    world.rates = {"tight": 300.0, "loose": 300.0}
    world.run(300)
    assert max(world.asked) == world.wanted == 6
    assert sum(world.roles.shares.values()) == 6
    assert min(world.roles.shares[name] for name in ("tight", "loose")) >= 2, "neither starves"


def test_a_tiers_maximum_holds() -> None:
    world = World(ScalingOptions(min_replicas=1, max_replicas=20), table(tight=(0, 2)), rates={"tight": 300.0})
    world.run(200)
    assert world.scaler.wanted["tight"] == 2
    assert world.wanted == 2


@pytest.mark.parametrize("by_hand", [1, 8])
def test_a_size_set_by_hand_is_not_fought(by_hand: int) -> None:
    world = World(ScalingOptions(min_replicas=1, max_replicas=10, manual_hold_s=600.0), rates={"tight": 30.0})
    world.run(300)
    automatic = world.wanted
    assert automatic not in (1, 8)
    world.resize(by_hand)
    world.run(590)
    assert world.wanted == by_hand
    assert world.sizes()[-1] == by_hand
    world.run(1200)
    assert world.wanted == pytest.approx(automatic, abs=1), "and later it follows the load again"


@pytest.mark.parametrize("by_hand", [2, 6])
def test_a_size_set_by_hand_counts_what_was_draining(by_hand: int) -> None:
    views = [ReplicaView("a", (2, 0), load=0.4), ReplicaView("b", (0, 0), best_effort=3), ReplicaView("c", (0, 3))]
    scaler, signals = scripted(views)
    scaler.step(signals, 130.0)
    assert scaler.roles.names(Kind.DRAINING) == ["b"]
    emptied = [views[0], ReplicaView("b", (0, 0)), *([views[2]] if by_hand > 2 else [])]
    scaler.roles.step(emptied, 131.0)
    assert scaler.step(Signals(Serve(by_hand), emptied, {}, {}, H100), 131.0) == Actions(), "it stays, though empty"
    assert scaler.roles.names(Kind.DRAINING) == []
    assert scaler.target == by_hand


def test_a_size_by_hand_is_still_bounded() -> None:
    world = World(ScalingOptions(min_replicas=2, max_replicas=4))
    world.run(10)
    world.resize(1)
    world.run(2)
    assert world.wanted == 2
    world.resize(7)
    world.run(300)
    assert world.wanted == 4


def test_a_cold_start_does_not_trigger_a_second_one() -> None:
    world = World(ScalingOptions(min_replicas=1, max_replicas=30), replicas=1, start_s=180.0, rates={"tight": 25.0})
    world.run(40)
    first = world.wanted
    assert first > 1
    world.waiting = {"tight": 40_000.0, "loose": 90_000.0}  # what piles up meanwhile
    world.run(140)
    assert world.wanted == first
    world.run(60)
    assert world.wanted > first, "the queue did not melt although all are up"


def test_waiting_work_counts_as_demand() -> None:
    world = World(ScalingOptions(min_replicas=1, max_replicas=30), rates={"tight": 1.0})
    world.run(300)
    small = world.wanted
    world.waiting = {"tight": 60_000.0}
    world.run(10)
    assert world.wanted > small


def test_a_queue_that_comes_and_goes_starts_nothing() -> None:
    world = World(ScalingOptions(min_replicas=1, max_replicas=30), rates={"tight": 1.0})
    world.run(300)
    small = world.wanted
    for _ in range(20):
        world.waiting = {"tight": 60_000.0}  # many replicas' worth, were it to last
        world.run(1)
        world.waiting = {}
        world.run(20)
    assert world.wanted == small
    world.waiting = {"tight": 60_000.0}
    world.run(15)
    assert world.wanted > small


def test_without_a_cool_down_it_grows_at_every_step() -> None:
    world = World(ScalingOptions(min_replicas=1, max_replicas=40, upscale_cooldown_s=0.0), start_s=0.0)
    world.waiting = {"tight": 60_000.0}
    for second in range(10):
        world.rates = {"tight": 10.0 * second}
        world.run(1)
    grown_s = [c.at_s for c in world.history if c.what == "fleet" and c.reason.startswith("demand")]
    assert min(np.diff(grown_s)) == 1.0


def test_it_grows_only_for_demand_that_lasts_as_long_as_the_delay() -> None:
    options = ScalingOptions(min_replicas=1, max_replicas=9, upscale_delay_s=20.0, look_back_period_s=5.0)
    world = World(options, replicas=1, start_s=0.0)
    for burst_s, pause_s in ((15, 30), (15, 30)):
        world.rates = {"tight": 60.0}
        world.run(burst_s)
        world.rates = {}
        world.run(pause_s)
    assert world.wanted == 1, "each burst starts the delay anew"
    begin_s, world.rates = world.now_s, {"tight": 60.0}
    world.run(60)
    grown_s = [c.at_s for c in world.history if c.what == "fleet" and c.reason.startswith("demand")]
    assert 20.0 <= grown_s[0] - begin_s <= 25.0


def test_an_empty_fleet_grows_without_the_delay() -> None:
    world = World(ScalingOptions(min_replicas=0, max_replicas=5, upscale_delay_s=600.0), replicas=0)
    world.rates = {"tight": 1.0}
    world.run(10)
    assert world.wanted > 0


def test_a_warm_spare_is_kept_beside_the_demand() -> None:
    plain = World(ScalingOptions(min_replicas=1, max_replicas=20), rates={"tight": 30.0})
    spare = World(ScalingOptions(min_replicas=1, max_replicas=20, warm_spares=2), rates={"tight": 30.0})
    for world in (plain, spare):
        world.run(200)
    assert spare.wanted == plain.wanted + 2


def test_cool_downs_are_kept() -> None:
    world = World(ScalingOptions(min_replicas=1, max_replicas=40, upscale_cooldown_s=30.0, downscale_cooldown_s=50.0))
    for second in range(100):
        world.rates = {"tight": 2.0 * second}
        world.run(1)
    grown_s = [c.at_s for c in world.history if c.what == "fleet" and c.reason.startswith("demand")]
    assert min(np.diff(grown_s)) >= 30.0
    world.rates = {}
    world.run(1500)
    drained_s = sorted({change.at_s for change in world.history if change.after == "draining"})
    assert min(np.diff(drained_s)) >= 50.0


def test_scale_to_zero_only_where_the_minimum_is_zero_and_back_for_the_first_request() -> None:
    world = World(ScalingOptions(min_replicas=0, max_replicas=5), replicas=1)
    world.run(500)
    assert world.wanted == 0
    world.rates = {"flex": 1.0}
    world.run(10)
    assert world.wanted == 1
    one = World(ScalingOptions(min_replicas=1, max_replicas=5), replicas=1)
    one.run(500)
    assert one.wanted == 1


def scripted(views: list[ReplicaView], options: ScalingOptions | None = None) -> tuple[Autoscaler, Signals]:
    """An idle fleet of these replicas that could do with one, watched for long enough."""
    roles, history = DynamicRoles(table()), History()
    roles.step(views, 0.0)
    scaler = Autoscaler(options or ScalingOptions(min_replicas=1, max_replicas=9), roles, history)
    signals = Signals(Serve(len(views)), views, {}, {}, H100)
    scaler.step(signals, 0.0)
    return scaler, signals


def test_the_victim_is_the_least_used_and_goes_only_when_empty() -> None:
    busy = [ReplicaView("a", (2, 0), load=0.4), ReplicaView("b", (0, 0), best_effort=3), ReplicaView("c", (0, 3))]
    scaler, signals = scripted(busy)
    assert scaler.step(signals, 130.0) == Actions()
    assert scaler.roles.names(Kind.DRAINING) == ["b"]
    assert scaler.step(signals, 140.0) == Actions(), "it still has work"
    emptied = [busy[0], ReplicaView("b", (0, 0)), busy[2]]
    assert scaler.step(Signals(Serve(3), emptied, {}, {}, H100), 141.0) == Actions(remove=("b",))
    scaler.on_removed("b", 142.0)
    assert scaler.target == 2


def test_best_effort_work_delays_a_removal_for_so_long_only_and_slo_work_for_as_long_as_it_takes() -> None:
    views = [ReplicaView("a", (2, 0), load=0.4), ReplicaView("b", (0, 0), best_effort=3)]
    scaler, signals = scripted(views)
    scaler.step(signals, 130.0)
    assert scaler.step(signals, 429.0) == Actions()
    carrying = [views[0], ReplicaView("b", (1, 0), best_effort=3)]
    assert scaler.step(Signals(Serve(2), carrying, {}, {}, H100), 430.0) == Actions()
    assert scaler.step(signals, 430.0) == Actions(remove=("b",))


def test_a_draining_replica_is_taken_back_before_a_new_one_starts() -> None:
    views = [ReplicaView("a", (2, 0), load=0.4), ReplicaView("b", (0, 0), best_effort=3)]
    scaler, signals = scripted(views)
    scaler.step(signals, 130.0)
    assert scaler.roles.names(Kind.DRAINING) == ["b"]
    busy = Signals(Serve(2), views, {"tight": Load(15.0, 15_000.0, 3_000.0)}, {}, H100)
    assert scaler.step(busy, 131.0) == Actions()
    assert scaler.roles.names(Kind.DRAINING) == []
    more = Signals(Serve(2), views, {"tight": Load(60.0, 60_000.0, 12_000.0)}, {}, H100)
    assert (scaler.step(more, 132.0).replicas or 0) > 2


def test_a_shrink_that_was_taken_back_makes_the_next_one_wait_longer() -> None:
    world = World(ScalingOptions(min_replicas=1, max_replicas=9, look_back_period_s=10.0), replicas=1)
    waits = []
    for _ in range(4):
        world.rates = {"tight": 30.0}
        world.run(120)
        world.rates, since_s, drained = {}, world.now_s, len(world.removed)
        while len(world.removed) == drained:
            world.run(1)
        waits.append(world.now_s - since_s)
    assert waits[0] < 140.0
    assert waits[3] > 4.0 * waits[0]


def test_a_shared_pool_takes_the_sum_of_what_tiers_take() -> None:
    rates = {"tight": 20.0, "loose": 20.0}
    shared, apart = (
        World(ScalingOptions(min_replicas=1, max_replicas=20), rates=dict(rates), is_shared=is_shared)
        for is_shared in (True, False)
    )
    for world in (shared, apart):
        world.run(300)
    parts = shared.scaler.wanted
    assert parts["tight"] % 1.0 > 0.0
    assert shared.wanted == int(np.ceil(sum(parts.values())))
    assert shared.wanted <= apart.wanted
    shared.rates = {}
    shared.run(1200)
    assert shared.wanted == 1, "shared replicas drain too"


def test_what_a_tier_has_to_itself_is_not_drained() -> None:
    tiers = TierTable.of(1, [Tier("tight", 0.3, 0.02, num_replicas=2), Tier("loose", 3.0, 0.1)])
    options = ScalingOptions(min_replicas=1, max_replicas=8)
    world = World(options, tiers, replicas=6, is_shared=True)
    world.run(1500)
    assert world.wanted == 2
    assert {world.roles.position(name) for name in world.names} == {0}
