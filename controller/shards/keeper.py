"""The shell of a shard: the loop in which it tells the leader its state and does as that says. Knows Ray and a clock.

The leader does the same with itself. Without the leader a shard decides on: its replicas and its part of all bounds
stay as they are, and the fleet keeps its size.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import msgspec
import ray

from controller.fleet import Fleet
from controller.options import FleetOptions
from controller.scaling.signals import Serve
from controller.scaling.sizing import SCALE_S
from controller.serve_scaler import ScalingError, ServeScaler
from controller.shards.member import Member
from controller.shards.share import WHOLE
from controller.shards.sizes import Sizes
from controller.size_keeper import Scaler
from protocol.shards import LEADER, ShardOrders, ShardReport

logger = logging.getLogger("polyslo.shards")

SYNC_S = 0.5
ANSWER_S = 1.0  # that the leader may take
RESIZE_S = 60.0  # to change the size: Serve has to notice what was ended, and others' changes come first

T = TypeVar("T")

_report = msgspec.msgpack.Decoder(ShardReport)
_orders = msgspec.msgpack.Decoder(ShardOrders)


class ShardKeeper:
    """Shard number ``shard`` of the controller called ``name``, which is the leader's name as well."""

    def __init__(self, shard: int, name: str, namespace: str, clock: Callable[[], float]) -> None:
        self.member = Member(shard)
        self._name, self._namespace, self._clock = name, namespace, clock
        self._actor: Any = None  # the leader, as others call it
        self._scaler: ServeScaler | None = None  # of the whole fleet
        self._through_leader = ShardScaler(self)
        self._resizing = asyncio.Lock()
        self._fleet: Callable[[], Fleet | None] = lambda: None

    @property
    def is_leader(self) -> bool:
        return self.member.shard == LEADER

    # -- what a shard does ------------------------------------------------------------------------------------------

    async def run(self, fleet: Callable[[], Fleet | None]) -> None:
        """Follow the leader for ever."""
        self._fleet = fleet
        told = ""
        while True:
            await asyncio.sleep(SYNC_S)
            known = fleet()
            if known is None or (self.is_leader and not self._has_others(known)):
                continue
            try:
                await self._sync(known)
                told = ""
            except Exception as error:  # whatever it was: ended, this loop would leave its replicas to nobody
                if told != repr(error):
                    logger.warning("the leader is not reached: %r", error)
                told = repr(error)

    @staticmethod
    def _has_others(fleet: Fleet) -> bool:
        """Whether there are other shards, or were until now."""
        return fleet.options.controller_shards > 1 or fleet.allocation.share != WHOLE

    async def _sync(self, fleet: Fleet) -> None:
        asked = self._through_leader.asked
        report = msgspec.msgpack.encode(self.member.report(fleet, self._clock()))
        orders = _orders.decode(await self.ask("sync_shard", report))
        if asked != self._through_leader.asked:  # it has asked for another size meanwhile
            orders = msgspec.structs.replace(orders, size=self.member.size)
        if (now := self._fleet()) is not None:
            self.member.follow(now, orders, self._clock())

    async def ask(self, method: str, *arguments: Any, patience_s: float = ANSWER_S) -> Any:
        """The leader's answer; the leader asks itself."""
        if self.is_leader:
            return await getattr(self, method)(*arguments)
        try:
            if self._actor is None:
                self._actor = await asyncio.to_thread(ray.get_actor, self._name, self._namespace or None)
            answer = asyncio.wrap_future(getattr(self._actor, method).remote(*arguments).future())
            return await asyncio.wait_for(answer, patience_s)
        except (ValueError, TimeoutError, ray.exceptions.RayError):
            self._actor = None
            raise

    def scaler(self, options: FleetOptions) -> Scaler:
        """Who changes the size: Serve's own scaler, or the leader where there are several shards."""
        return self._through_leader if options.controller_shards > 1 else self._of_fleet(options)

    def _of_fleet(self, options: FleetOptions) -> ServeScaler:
        wanted = options.application, options.deployments
        if self._scaler is None or (self._scaler.application, self._scaler.deployments) != wanted:
            self._scaler = ServeScaler(*wanted)
        return self._scaler

    # -- what the leader does for all -------------------------------------------------------------------------------

    async def sync_shard(self, report: bytes) -> bytes:
        """A shard's state; what it is to do."""
        fleet, leader = self._fleet(), self.member.leader
        leader.shards = 1 if fleet is None else fleet.options.controller_shards
        if fleet is None:
            raise RuntimeError("the leader has no tier table yet")
        return msgspec.msgpack.encode(leader.sync(_report.decode(report), self._clock()))

    async def resize_shard(self, shard: int, replicas: int) -> None:
        """A shard wants so many replicas."""
        async with self._resizing:
            sizes = self._sizes_with(shard)
            await self._changed(sizes, self._of_fleet(self._options()).resize(sizes.total_with(shard, replicas)))
            sizes.ask(shard, replicas)  # not before: what Serve has refused is nobody's part

    async def remove_of_shard(self, shard: int, names: Sequence[str]) -> tuple[int, list[str]]:
        """End these drained replicas of a shard; returns its part without them, and those that Serve knows."""
        async with self._resizing:
            sizes = self._sizes_with(shard)
            removed = await self._changed(sizes, self._of_fleet(self._options()).remove(names))
            sizes.removed(shard, len(removed))
            return sizes.parts[shard], removed

    @staticmethod
    async def _changed(sizes: Sizes, change: Awaitable[T]) -> T:
        """Wait for a change of the size; where it fails it may have come to pass all the same."""
        try:
            return await change
        except Exception:
            sizes.is_unsure = True
            raise

    def _sizes_with(self, shard: int) -> Sizes:
        """The parts of all; without this shard's own its wish would stand for that of the others, or be added to it."""
        sizes = self.member.leader.sizes
        if shard not in sizes.parts:
            raise ScalingError(f"the leader does not know the part of shard {shard} yet")
        return sizes

    def _options(self) -> FleetOptions:
        if (fleet := self._fleet()) is None:
            raise RuntimeError("the leader has no tier table yet")
        return fleet.options

    async def follow_serve(self, fleet: Callable[[], Fleet | None]) -> None:
        """Learn the fleet's size from Serve, as long as this shard leads others."""
        while True:
            await asyncio.sleep(SCALE_S)
            known = fleet()
            scaling = known.options.allocation.scaling if known is not None else None
            if known is None or scaling is None or not self.is_leader or known.options.controller_shards == 1:
                self.member.leader.sizes = Sizes()  # what it knew of the size is not so when there are others again
                continue
            try:
                most = max(scaling.max_replicas, scaling.min_replicas, sum(tier.low for tier in known.tiers.tiers))
                async with self._resizing:
                    scaler = self._of_fleet(known.options)
                    live = self.member.leader.live(self._clock())
                    again = self.member.leader.sizes.follow(await scaler.size(), live, scaling.configured, most)
                    if again is not None:
                        await scaler.resize(again)
            except Exception as error:  # the shards' own scalers tell of it, for they have no size then
                logger.warning("size of the fleet: %r", error)


class ShardScaler:
    """Changes one shard's part of the fleet's size, by asking the leader."""

    def __init__(self, keeper: ShardKeeper) -> None:
        self._keeper = keeper
        self.asked = 0  # how often it has asked for something

    async def size(self) -> Serve | None:
        """The shard's part of it, as the leader said last."""
        part = self._keeper.member.size
        return None if part is None else Serve(part.replicas, part.running, part.deployed, part.unplaced)

    async def resize(self, replicas: int) -> None:
        """Ask for so many in all."""
        await self._keeper.ask("resize_shard", self._keeper.member.shard, replicas, patience_s=RESIZE_S)
        self._note(replicas)

    async def remove(self, replicas: Sequence[str]) -> Sequence[str]:
        """End these replicas, and ask for as many less; returns those that Serve knows."""
        shard, before = self._keeper.member.shard, self._keeper.member.size
        told = await self._keeper.ask("remove_of_shard", shard, list(replicas), patience_s=RESIZE_S)
        if not isinstance(told, tuple):  # of a leader of an earlier version, which ends all or none
            told = told, list(replicas)
        left, removed = told
        if left is not None:  # it may have told of that before it answered, or have cut the part anew before that
            self._note(left)
        elif before is not None:
            self._note(max(0, before.replicas - len(replicas)))
        return list(removed)

    def _note(self, replicas: int) -> None:
        """What it has asked for is its part now; what the leader said before that is out of date."""
        self.asked += 1
        if (part := self._keeper.member.size) is not None:
            running = min(part.running, replicas)
            self._keeper.member.size = msgspec.structs.replace(part, replicas=replicas, running=running)
