"""The way to one controller: over a socket of its own while that is up, otherwise through Ray."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import ray

from controller.actor import start_controller
from protocol.links import ADMIT, OUTCOMES, AdmitCall
from protocol.messages import Admission, AdmissionRequest, Outcome
from protocol.shards import LEADER, shard_name
from protocol.token_hub import Channel, TokenHub

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
        self._channel: Channel | None = None
        self._deploy_number = 0  # of this ingress's deploy, as the controller said (``controller.deploys``)

    def actor(self) -> Any:
        """The controller's handle; it stays valid when the actor restarts."""
        if self._actor is None:
            self._actor = ray.get_actor(shard_name(self._controller, self.shard), namespace=self._namespace)
        return self._actor

    async def _ask(self, method: str, *arguments: Any) -> Any:
        try:
            return await getattr(self.actor(), method).remote(*arguments)
        except ray.exceptions.ActorDiedError:
            self._actor = None  # a new one may carry the name
            raise

    def start(self) -> None:
        """Start the controller where there is none."""
        start_controller(self._controller, self._namespace, self.shard)

    async def configure(self, options: bytes, tiers: bytes) -> None:
        """Tell it what this ingress knows."""
        self._deploy_number = int(await self._ask("configure", options, tiers, self._deploy_number))

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
