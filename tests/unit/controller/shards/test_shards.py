"""Several controllers as they run, without Ray: who has which replica, whatever dies, comes late or is taken away."""

import asyncio
import math
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec
import pytest

from controller import actor, size_keeper
from controller.actor import Controller
from controller.options import FleetOptions
from controller.scaling.allocation import AllocationOptions
from controller.scaling.autoscaler import Autoscaler
from controller.scaling.signals import ScalingOptions, Serve
from controller.scaling.tiers import Tier, TierTable
from controller.serve_scaler import NOTICE_S, ScalingError, ServeScaler
from controller.shards import keeper
from controller.shards.keeper import ANSWER_S
from protocol.messages import Admission, AdmissionRequest, Report, Slo, Verdict
from protocol.report_answers import TELL_ALL, next_shard

H200 = "h200_sxm__llama-3.1-8b"
REPORT_S = 0.02
TIERS = TierTable.of(
    1, [Tier("tight", 0.3, 0.03, min_replicas=2), Tier("loose", 3.0, 0.1), Tier("flex", best_effort=True)]
)
admission_of = msgspec.msgpack.Decoder(Admission)


class FakeServe(ServeScaler):
    """Serve, which starts and ends whatever it is asked for."""

    def __init__(self, replicas: int) -> None:
        super().__init__("", ())
        self.replicas, self.looks = replicas, 0
        self.error: Exception | None = None  # of whoever asks for another size

    async def size(self) -> Serve:
        self.looks += 1
        return Serve(self.replicas, self.replicas)

    async def resize(self, replicas: int) -> None:
        if self.error is not None:
            raise self.error
        self.replicas = replicas


class World:
    """Controllers that reach each other, and replicas that report as ``replicas.reporter`` does."""

    def __init__(self, shards: int, replicas: int, options: FleetOptions) -> None:
        self.options = msgspec.structs.replace(options, controller_shards=shards)
        self.serve = FakeServe(replicas)
        self.controllers: dict[int, Controller] = {}
        self.home = dict.fromkeys([f"replica-{i}" for i in range(replicas)], 0)
        self.sequence = 0

    async def start(self, shard: int) -> None:
        controller = self.controllers[shard] = Controller(shard=shard, name="leader")
        controller.shard.ask = self._ask_of(controller)  # type: ignore[method-assign, assignment]
        controller.shard._scaler = self.serve
        await self.configure()

    async def configure(self) -> None:
        for controller in self.controllers.values():
            await controller.configure(msgspec.msgpack.encode(self.options), msgspec.msgpack.encode(TIERS))

    def _ask_of(self, asking: Controller) -> Callable[..., Awaitable[Any]]:
        async def ask(method: str, *arguments: Any, patience_s: float = 1.0) -> Any:
            leader = asking if asking.shard.is_leader else self.controllers.get(0)
            if leader is None:
                raise TimeoutError
            return await getattr(leader.shard, method)(*arguments)

        return ask

    async def kill(self, shard: int) -> None:
        controller = self.controllers.pop(shard)
        for task in controller._tasks:
            task.cancel()
        await asyncio.gather(*controller._tasks, return_exceptions=True)

    async def report(self) -> None:
        """Every replica reports once, and goes where it is told."""
        self.sequence += 1
        for name, home in self.home.items():
            controller = self.controllers.get(home)
            if controller is None:
                self.home[name] = 0 if home else min(self.controllers, default=0)
                continue
            report = Report(name, "1", self.sequence, H200, 400_000, 0, 256, 8192, 0.0)
            answer = await controller.report(msgspec.msgpack.encode(report))
            if (other := next_shard(answer)) is not None:
                self.home[name] = other
            else:
                assert answer != TELL_ALL

    async def until(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(20.0):
            while not is_so():
                await self.report()
                await asyncio.sleep(REPORT_S)

    def has(self, *homes: int) -> bool:
        return self.homes() == list(homes)

    def homes(self) -> list[int]:
        """Replicas of each shard that lives, as it knows them."""
        fleets = [self.controllers[shard].fleet for shard in sorted(self.controllers)]
        return [len(fleet.replicas) if fleet else 0 for fleet in fleets]

    def bounds(self) -> list[int]:
        """The least replicas of the first tier, of each shard that lives."""
        return [low(self.controllers[shard]) for shard in sorted(self.controllers)]


def run(
    shards: int, replicas: int, scenario: Callable[[World], Awaitable[None]], options: FleetOptions | None = None
) -> None:
    async def play() -> None:
        world = World(shards, replicas, options or FleetOptions(allocation=AllocationOptions("dynamic")))
        try:
            for shard in range(shards):
                await world.start(shard)
            await scenario(world)
        finally:
            for shard in list(world.controllers):
                await world.kill(shard)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(actor, "warm_up", lambda: None)
        patch.setattr(keeper, "SYNC_S", 0.02)
        patch.setattr(keeper, "SCALE_S", 0.02)
        patch.setattr(size_keeper, "SCALE_S", 0.02)
        asyncio.run(play())


def low(controller: Controller) -> int:
    assert controller.fleet is not None
    return controller.fleet.allocation.table.tiers[0].low


def test_replicas_and_bounds_are_divided() -> None:
    async def scenario(world: World) -> None:
        await world.until(lambda: world.homes() == [3, 3, 2] and world.bounds() == [1, 1, 0])
        await world.report()
        assert (world.homes(), world.bounds()) == ([3, 3, 2], [1, 1, 0]), "and so it stays"

    run(3, 8, scenario)


@pytest.mark.parametrize("dead", [0, 2])
def test_replicas_of_a_dead_shard_are_adopted_and_come_back(dead: int) -> None:
    async def scenario(world: World) -> None:
        await world.until(lambda: world.homes() == [3, 3, 3])
        await world.kill(dead)
        await world.until(lambda: sum(world.homes()) == 9)
        if dead:  # without a leader, bounds stay as they are
            await world.until(lambda: sum(low(each) for each in world.controllers.values()) == 2)
        await world.start(dead)
        await world.until(lambda: world.homes() == [3, 3, 3] and world.bounds() == [1, 1, 0])
        await world.report()
        assert (world.homes(), world.bounds()) == ([3, 3, 3], [1, 1, 0]), "and so it stays"

    run(3, 9, scenario)


def test_the_number_of_shards_changes_in_place() -> None:
    async def scenario(world: World) -> None:
        await world.until(lambda: world.homes() == [4, 4])
        for shards in (1, 3):
            deploy = f"deploy {shards}"
            world.options = msgspec.structs.replace(world.options, controller_shards=shards, deploy=deploy)
            for shard in range(shards):
                if shard not in world.controllers:
                    await world.start(shard)
            await world.configure()
            await world.until(partial(world.has, *([8, 0] if shards == 1 else [3, 3, 2])))
            assert low(world.controllers[0]) == (2 if shards == 1 else 1)

    run(2, 8, scenario)


def test_autoscalers_agree_on_the_sum() -> None:
    scaling = ScalingOptions(min_replicas=1, max_replicas=9, warm_spares=0, upscale_cooldown_s=0.0)
    options = FleetOptions(allocation=AllocationOptions("dynamic", scaling=scaling))

    async def scenario(world: World) -> None:
        def targets() -> list[int | None]:
            found = (world.controllers[shard].fleet for shard in range(2))
            return [fleet.allocation.autoscaler.target for fleet in found if fleet and fleet.allocation.autoscaler]

        await world.until(lambda: targets() == [2, 1])
        first = world.controllers[0].fleet
        assert first is not None
        assert first.allocation.autoscaler is not None
        assert first.allocation.autoscaler.options.max_replicas == 5
        assert first.allocation.autoscaler.held_until_s < 0.0, "nobody has set anything by hand"
        await world.controllers[1].shard._through_leader.resize(3)
        assert world.serve.replicas == 5
        world.home |= {"replica-3": 0, "replica-4": 0}  # they have started
        await world.until(lambda: world.homes() == [2, 3])
        world.serve.replicas = 4  # somebody sets it by hand
        await world.until(lambda: targets() == [2, 2])
        second = world.controllers[1].fleet
        assert second is not None
        assert second.allocation.autoscaler is not None
        assert second.allocation.autoscaler.held_until_s > 0.0, "its part is another one than it asked for"

    run(2, 3, scenario, options)


def test_what_serve_refuses_is_not_taken_for_a_size_set_by_hand() -> None:
    scaling = ScalingOptions(min_replicas=2, max_replicas=8)
    options = FleetOptions(allocation=AllocationOptions("dynamic", scaling=scaling))

    async def scenario(world: World) -> None:
        def scalers() -> list[Autoscaler]:
            fleets = [world.controllers[shard].fleet for shard in range(2)]
            return [fleet.allocation.autoscaler for fleet in fleets if fleet and fleet.allocation.autoscaler]

        sizes = world.controllers[0].shard.member.leader.sizes
        await world.until(lambda: [each.target for each in scalers()] == [2, 2])
        sizes.parts, sizes.moves = {0: 1, 1: 3}, sizes.moves + 1
        await world.until(lambda: [each.target for each in scalers()] == [1, 3])
        world.serve.error = ScalingError("no such thing")
        with pytest.raises(ScalingError):
            await world.controllers[1].shard._through_leader.resize(4)
        looks = world.serve.looks
        await world.until(lambda: world.serve.looks > looks + 2)
        assert sizes.parts == {0: 1, 1: 3}
        assert [each.held_until_s for each in scalers()] == [-math.inf, -math.inf]

    run(2, 4, scenario, options)


def test_a_resize_waits_for_removals_of_other_shards() -> None:
    """Serve notices the end of a replica late; a resize that was given up would be carried out all the same."""
    patience = []

    async def ask(method: str, *arguments: Any, patience_s: float = ANSWER_S) -> None:
        patience.append(patience_s)

    shard = keeper.ShardKeeper(1, "leader", "", lambda: 0.0)
    shard.ask = ask  # type: ignore[method-assign]
    asyncio.run(shard._through_leader.resize(3))
    assert patience[0] > NOTICE_S


def test_a_leader_that_does_not_know_a_shards_part_takes_no_wish_of_it_for_the_size_of_all() -> None:
    """One that had just begun asked Serve for five replicas of twelve, where one shard of three wanted one more."""

    async def scenario(world: World) -> None:
        await world.until(lambda: world.homes() == [4, 4, 4] and world.serve.replicas == 12)
        await world.until(lambda: all(c.shard.member.size is not None for c in world.controllers.values()))
        await world.kill(0)
        await world.start(0)
        while world.controllers[0].shard._fleet() is None:
            await asyncio.sleep(0)
        with pytest.raises(ScalingError, match="does not know the part of shard 1"):
            await world.controllers[0].shard.resize_shard(1, 5)
        with pytest.raises(ScalingError, match="does not know the part of shard 1"):
            await world.controllers[0].shard.remove_of_shard(1, [])
        assert world.serve.replicas == 12

    scaling = ScalingOptions(min_replicas=3, max_replicas=30)
    run(3, 12, scenario, FleetOptions(allocation=AllocationOptions("dynamic", scaling=scaling)))


def test_a_shard_without_room_says_so_and_keeps_nothing() -> None:
    async def scenario(world: World) -> None:
        await world.until(lambda: world.homes() == [1, 1])
        asked = AdmissionRequest("r", 100_000, 10, Slo(0.3, 0.03, tier="tight"), may_hop=True)
        group = [msgspec.structs.replace(asked, request_id=f"g-{i}", group="g") for i in range(3)]
        controller = world.controllers[1]
        told = admission_of.decode(await controller.admit(msgspec.msgpack.encode([asked, *group])))
        assert {decision.verdict for decision in told.decisions} == {Verdict.ELSEWHERE}
        assert controller.fleet is not None
        assert not controller.fleet.unplaced.waiting
        assert not controller.fleet.allocation.demand.loads(0.0), "it is counted where it is served"
        possible = msgspec.structs.replace(asked, request_id="p", prompt_tokens=100)
        told = admission_of.decode(await controller.admit(msgspec.msgpack.encode([possible])))
        assert told.decisions[0].verdict == Verdict.ADMITTED
        assert controller.fleet.allocation.demand.loads(0.0)
        assert told.load < float("inf")

    run(2, 2, scenario)
