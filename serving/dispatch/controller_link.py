"""The way to one controller: over a socket of its own while that is up, otherwise through Ray."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import ray

from controller.launch import prepare, start_controller
from controller.options import FleetOptions
from controller.upgrade import CONTROLLER_PACKAGES, code_id
from protocol.links import ADMIT, OUTCOMES, AdmitCall
from protocol.messages import Admission, AdmissionRequest, Outcome
from protocol.shards import LEADER, shard_name
from protocol.token_hub import Channel, TokenHub
from serving.dispatch.upgrader import Upgrader, end_actor, has_name, in_new_process

HAND_OVER_S = 10.0  # that a controller may take for it; then the next one begins without
TAKE_OVER_S = 60.0

logger = logging.getLogger("polyslo.dispatch")

_admission = msgspec.msgpack.Decoder(Admission)


class ControllerLink:
    """One ingress's end of the way to one shard; every failure is an exception, and changes no other link."""

    def __init__(
        self, controller: str, namespace: str, ingress_id: str, open_hub: Callable[[], TokenHub], shard: int = LEADER
    ) -> None:
        """``controller``: the leader's name; ``open_hub`` gives where sockets are opened, when one is needed."""
        self.shard = shard
        self._controller, self._namespace, self._ingress_id = controller, namespace, ingress_id
        self._open_hub = open_hub
        self._actor: Any = None
        self._finding: asyncio.Task[Any] | None = None
        self._channel: Channel | None = None
        self._upgrader = Upgrader(code_id(*CONTROLLER_PACKAGES), ingress_id, self._prepare, self._upgrade)
        self._handed: dict[str, bytes] = {}  # by a controller that was ended, until the next one has it

    @property
    def _name(self) -> str:
        return shard_name(self._controller, self.shard)

    async def actor(self) -> Any:
        """The controller's handle; it stays valid when the actor restarts.

        Ray's head may be away for a minute: one thread waits for it, however many want to know, and the event loop goes
        on with tokens.
        """
        while self._actor is None:
            if self._finding is None or self._finding.done():
                looking = asyncio.to_thread(ray.get_actor, self._name, self._namespace)
                self._finding = asyncio.get_running_loop().create_task(looking)
            found = await asyncio.shield(finding := self._finding)
            if self._finding is finding and self._actor is None:  # otherwise it may be one that has died meanwhile
                self._actor = found
        return self._actor

    async def _ask(self, method: str, *arguments: Any) -> Any:
        try:
            return await getattr(await self.actor(), method).remote(*arguments)
        except ray.exceptions.ActorDiedError:
            self._forget()  # a new one may carry the name
            raise

    def _forget(self) -> None:
        self._actor, self._finding, self._upgrader.is_agreed = None, None, False

    async def start(self) -> None:
        """Start the controller where none is known: one that has died is not, once a call has failed by that."""
        if self._actor is None:
            named = self._controller, self._namespace, self.shard, self._upgrader.number
            self._actor = await asyncio.to_thread(start_controller, *named)

    async def configure(self, options: bytes, tiers: bytes) -> None:
        """Tell it what this ingress knows. One with the code of an earlier deploy is followed in the background."""
        if self._handed:
            await self._hand_on()
        if not self._upgrader.is_agreed:
            wanted = msgspec.msgpack.decode(options, type=FleetOptions)
            await self._upgrader.greet(await self.actor(), self._ask, wanted.application, wanted.deploy)
        self._upgrader.number = int(await self._ask("configure", options, tiers, self._upgrader.number))

    async def _prepare(self) -> str:
        logger.info("controller %s has other code than this deploy: the next one's kernels are compiled", self._name)
        return str(await in_new_process(prepare))

    async def _upgrade(self, last: Any) -> None:
        """End this controller and start the next one, with the code that this deploy has on the head node."""
        handed = dict[str, bytes]()
        if hasattr(last, "hand_over"):
            try:
                handed = await asyncio.wait_for(last.hand_over.remote(), HAND_OVER_S)
            except Exception as error:
                logger.warning("controller %s hands nothing over: %r", self._name, error)
        if not await has_name(last, self._name, self._namespace):
            return  # another ingress was faster
        self._handed = handed
        await end_actor(last, self._name, self._namespace)
        self._forget()
        await self.start()
        async with asyncio.timeout(TAKE_OVER_S):
            await self._hand_on()
        logger.info("controller %s runs this deploy's code", self._name)

    async def _hand_on(self) -> None:
        """Give the next controller what the last one has learnt."""
        if self._handed:
            await self._ask("take_over", self._handed)
        self._handed = {}

    async def admit(self, batch: list[AdmissionRequest]) -> Admission:
        """Its decisions in the batch's order, and its load."""
        call = AdmitCall(self._ingress_id, time.monotonic(), msgspec.msgpack.encode(batch))
        if (channel := self._channel) and channel.is_up:
            answer = await channel.call(ADMIT, msgspec.msgpack.encode(call))
        else:
            answer = await self._ask("admit", call.batch, call.ingress, call.sent_s)
        return _admission.decode(answer)

    async def on_outcomes(self, outcomes: list[Outcome]) -> None:
        message = msgspec.msgpack.encode(outcomes)
        if (channel := self._channel) and channel.is_up:
            await channel.call(OUTCOMES, message)
        else:
            await self._ask("on_outcomes", message)

    async def hear_recalls(self) -> list[str]:
        """Attempt ids that must ask anew, as soon as there are some; none after a while."""
        return list(await self._ask("hear_recalls", self._ingress_id))

    async def reach(self) -> None:
        """Hold a socket to the controller, over which it is asked, until that or the controller ends."""
        channel = self._channel = self._open_hub().open(lambda _message: None)
        try:
            await until_ended(channel, self._ask("answer_over", msgspec.msgpack.encode(channel.link)))
        finally:
            self._open_hub().close_channel(channel)

    async def on_failed(self, replica: str) -> None:
        await self._ask("on_failed", replica)

    def close(self) -> None:
        """Leave an upgrade under way to another ingress."""
        self._upgrader.close()

    async def status(self) -> dict[str, Any]:
        return dict(msgspec.json.decode(await self._ask("status")))


async def until_ended(channel: Channel, call: Coroutine[Any, Any, Any]) -> None:
    """Wait for the end of a channel, or of the call that keeps it open; raises what ended it."""
    holding = asyncio.ensure_future(call)
    try:
        done, _ = await asyncio.wait((holding, channel.broken), return_when=asyncio.FIRST_COMPLETED)
        for ended in done:
            ended.result()
    finally:
        holding.cancel()
