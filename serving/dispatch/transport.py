"""``Transport`` over Ray: the controller's named actors, and replicas pinned through Serve's session id.

A replica of a named group is called ``group/id``, where id is Serve's own; a fleet of one kind has bare ids.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec
import ray
from ray.serve.exceptions import ReplicaUnavailableError

from protocol.kept_streams import TAKE, KeptStream
from protocol.links import ABORT, SUBMIT
from protocol.messages import AdmissionRequest, Decision, Outcome, Rejection, Submission
from protocol.names import group_of, process_of
from protocol.token_hub import Channel, TokenHub
from serving.dispatch.controller_link import ControllerLink, until_ended
from serving.dispatch.controller_shards import ControllerShards

ANYONE_S = 3.0
NEWBORN_S = 1.0  # in which Serve may not have told this process of a new replica
NEW_INGRESS_S = 8.0  # in which Serve may not have told a new ingress of a replica that its controller knows

_rejections = msgspec.msgpack.Decoder(list[Rejection])
_kept = msgspec.msgpack.Decoder(KeptStream | None)


class RayTransport:
    """One per ingress process. ``ingress_id`` is its own Serve id, by which replicas notice that it is gone."""

    def __init__(self, handles: Mapping[str, Any], ingress_id: str, controller: str, namespace: str) -> None:
        """``handles``: Serve's handle of each group's deployment, by the group's name."""
        self.handles, self.ingress_id, self._born_s = handles, ingress_id, time.monotonic()
        self.shards = ControllerShards(
            lambda shard: ControllerLink(controller, namespace, ingress_id, self._open_hub, shard)
        )
        self._hub: TokenHub | None = None  # made for the first channel
        self._channels: dict[str, Channel] = {}
        self._known: list[str] = []  # replicas lately decided for, newest last
        self._heard_s: dict[str, float] = {}  # replicas with an open channel, and when they last spoke

    async def configure(self, options: bytes, tiers: bytes, shards: int = 1) -> None:
        """Start the controller's shards where there are none, and tell them what this ingress knows."""
        await self.shards.configure(options, tiers, shards)

    async def admit(self, batch: list[AdmissionRequest]) -> list[Decision]:
        decisions = await self.shards.admit(batch)
        for decision in decisions:
            if decision.replica and decision.replica not in self._known:
                self._known = [*self._known[-31:], decision.replica]
        return decisions

    async def hear_recalls(self) -> list[str]:
        """Attempt ids that must ask anew, as soon as there are some; none after a while."""
        return await self.shards.hear_recalls()

    async def on_outcomes(self, outcomes: list[Outcome]) -> None:
        await self.shards.on_outcomes(outcomes)

    async def reach_controller(self) -> None:
        """Hold a socket to the controller, over which it is asked, until that or the controller ends."""
        await self.shards.reach()

    async def on_failed(self, replica: str) -> None:
        self._known = [name for name in self._known if name != replica]
        await self.shards.on_failed(replica)

    async def status(self) -> dict[str, Any]:
        return await self.shards.status()

    def _pinned(self, replica: str, **options: Any) -> Any:
        """A handle whose calls go to exactly this replica."""
        return self.handles[group_of(replica)].options(session_id=process_of(replica), **options)

    async def submit(self, replica: str, batch: list[Submission]) -> list[Rejection]:
        """Send requests; tells which of them the replica did not take, or which cannot be sent."""
        encoded, rejections = encode_each(batch)
        if encoded:
            rejections += _rejections.decode(await self._submit(replica, msgspec.msgpack.encode(encoded)))
        return rejections

    async def _submit(self, replica: str, message: bytes) -> bytes:
        """Over the replica's own channel where that is up, otherwise through Ray."""
        if (channel := self._channels.get(replica)) and channel.is_up:
            return await channel.call(SUBMIT, message)
        patience_s = self._patience_s()
        return await _reach(lambda: self._pinned(replica).submit.remote(self.ingress_id, message, replica), patience_s)

    async def abort(self, replica: str, request_ids: list[str]) -> None:
        if (channel := self._channels.get(replica)) and channel.is_up:
            await channel.call(ABORT, msgspec.msgpack.encode(request_ids))
        else:
            await self._pinned(replica).abort.remote(request_ids, replica)

    async def take_stream(self, replica: str, key: str) -> KeptStream | None:
        """Have a replica give away a stream that it keeps; None: it has none of this key. Safe to repeat."""
        if (channel := self._channels.get(replica)) and channel.is_up:
            return _kept.decode(await channel.call(TAKE, key.encode()))
        return _kept.decode(await _reach(lambda: self._pinned(replica).take.remote(key, replica), self._patience_s()))

    def _patience_s(self) -> float:
        """How long Serve may go on not telling this process of a replica that its controller knows."""
        return max(NEWBORN_S, self._born_s + NEW_INGRESS_S - time.monotonic())

    async def listen(self, replica: str, receive: Callable[[memoryview], None]) -> None:
        """Have a replica send its messages over a socket, as long as its call goes on: Ray carries nothing but the end.

        Returns, or raises what ended it, when nothing more will come.
        """

        def hear(message: memoryview) -> None:
            self._heard_s[replica] = time.monotonic()
            receive(message)

        channel = self._channels[replica] = self._open_hub().open(hear)
        try:
            await until_ended(channel, self._hold(replica, msgspec.msgpack.encode(channel.link)))
        finally:
            self._open_hub().close_channel(channel)
            if self._channels.get(replica) is channel:
                del self._channels[replica]
                self._heard_s.pop(replica, None)

    def _open_hub(self) -> TokenHub:
        self._hub = self._hub or TokenHub(ray.util.get_node_ip_address())
        return self._hub

    async def _hold(self, replica: str, link: bytes) -> None:
        """The call that keeps a channel open; it ends when the replica, its engine or its link does."""

        async def call() -> bytes:
            async for _ in self._pinned(replica, stream=True).channel.remote(self.ingress_id, link, replica):
                pass
            return b""

        await _reach(call, self._patience_s())

    def close(self) -> None:
        """Stop listening to everybody."""
        self.shards.close()
        if self._hub is not None:
            self._hub.close()

    def heard(self, within_s: float) -> set[str]:
        """Replicas that have spoken lately on a channel that is still open; idle ones send heartbeats."""
        now_s = time.monotonic()
        return {replica for replica, heard_s in self._heard_s.items() if now_s - heard_s < within_s}

    async def any_replica(self, exclude: Sequence[str]) -> str | None:
        """Some live replica, without the controller: one decided for lately, else whichever Serve picks."""
        if known := [name for name in self._known if name not in exclude]:
            return random.choice(known)
        for handle in self.handles.values():
            try:
                info = await asyncio.wait_for(self._anyone(handle), ANYONE_S)
            except Exception:
                continue
            return str(info["replica"])
        return None

    @staticmethod
    async def _anyone(handle: Any) -> dict[str, Any]:
        return dict(await handle.info.remote())


def encode_each(batch: Sequence[Submission]) -> tuple[list[msgspec.Raw], list[Rejection]]:
    """Each submission as a message of its own, and those that cannot be one."""
    encoded, rejections = [], []
    for submission in batch:
        try:
            encoded.append(msgspec.Raw(msgspec.msgpack.encode(submission)))
        except (ValueError, TypeError, OverflowError) as error:
            rejections.append(Rejection(submission.request_id, f"it cannot be encoded: {error!r}"))
    return encoded, rejections


async def _reach(call: Callable[[], Awaitable[Any]], patience_s: float) -> bytes:
    """What a replica answers through Serve, which may not have told this process of it yet.

    Raises:
        ReplicaUnavailableError: after ``patience_s`` Serve still knows of no such replica.
    """
    give_up_s = time.monotonic() + patience_s
    while True:
        try:
            return bytes(await call())
        except ReplicaUnavailableError:
            if time.monotonic() > give_up_s:
                raise
            await asyncio.sleep(0.1)
