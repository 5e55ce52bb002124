"""Which ingress hears about which request: one open stream per ingress, all deltas of an iteration in one message.

Plain asyncio: no ray here. Clock readings are the caller's.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence

import msgspec

from protocol.kept_streams import KeptStream
from protocol.messages import Delta, Outputs, Submission
from replicas.kept_streams import KeptStreams

ENDS_WITHOUT_TOKENS = ("error", "abort")

_encoder = msgspec.msgpack.Encoder()


def encode_outputs(outputs: Outputs) -> bytes:
    """A message; a delta that cannot be encoded becomes an error of its own request."""
    try:
        return _encoder.encode(outputs)
    except (ValueError, TypeError, OverflowError):
        return _encoder.encode(msgspec.structs.replace(outputs, deltas=tuple(map(_encodable, outputs.deltas))))


def _encodable(delta: Delta) -> Delta:
    try:
        _encoder.encode(delta)
    except (ValueError, TypeError, OverflowError) as error:
        return Delta(delta.request_id, (), "error", f"its output cannot be encoded: {type(error).__name__}")
    return delta


class Channel:
    """The stream to one ingress. What its reader did not take yet is merged: at most one delta of each request, but
    for those that carry more than tokens.
    """

    def __init__(self) -> None:
        self.pending: list[Delta] = []
        self._places: dict[str, int] = {}  # in ``pending``, of the deltas that may be prolonged
        self.ready = asyncio.Event()
        self.is_over = False
        self.closed_s: float | None = None  # when the reader went away; None while it reads

    def add(self, delta: Delta) -> None:
        """Queue a delta for the next message."""
        place = self._places.get(delta.request_id)
        if place is None or delta.extra or self.pending[place].extra or delta.finish in ENDS_WITHOUT_TOKENS:
            self._places[delta.request_id] = len(self.pending)
            self.pending.append(delta)
        else:
            self.pending[place] = _prolonged(self.pending[place], delta)
        self.ready.set()

    def take(self) -> tuple[Delta, ...]:
        """All that waits."""
        deltas, self.pending = tuple(self.pending), []
        self._places.clear()
        self.ready.clear()
        return deltas

    def take_over(self, older: "Channel") -> None:
        """What waits in a channel that this one replaces goes out here."""
        for delta in older.take():
            self.add(delta)


def _prolonged(delta: Delta, newer: Delta) -> Delta:
    """Two deltas of one request as one."""
    late = delta.late or newer.late
    return msgspec.structs.replace(newer, token_ids=delta.token_ids + newer.token_ids, late=late)


class Channels:
    """All streams of a replica and the request routes through them."""

    def __init__(self, heartbeat_s: float) -> None:
        self._heartbeat_s = heartbeat_s
        self._channels: dict[str, Channel] = {}
        self._routes: dict[str, str] = {}  # live request -> ingress
        self._emitted: dict[str, int] = {}  # live request -> output tokens so far
        self._finished: list[tuple[str, int]] = []
        self._failure: BaseException | None = None
        self._kept = KeptStreams()
        self.steps = 0
        self.busy = False
        self.load = 0.0
        self.draining = False

    def add(self, ingress_id: str, batch: Iterable[Submission], now_s: float) -> None:
        """Remember to whom the deltas of these requests go. The channel may be opened later."""
        if ingress_id not in self._channels:
            channel = self._channels[ingress_id] = Channel()
            channel.closed_s = now_s
        for submission in batch:
            self._routes[submission.request_id] = ingress_id
            self._emitted[submission.request_id] = submission.emitted_tokens
            self._kept.open(submission, now_s)

    def has(self, request_id: str) -> bool:
        """Whether a live request has this name."""
        return request_id in self._routes

    def forget(self, request_ids: Iterable[str], now_s: float) -> None:
        """Drop requests that were aborted."""
        for request_id in request_ids:
            if self._routes.pop(request_id, None) is not None:
                self._finished.append((request_id, self._emitted.pop(request_id)))
                self._kept.end(request_id, now_s)

    def deliver(self, deltas: Sequence[Delta], now_s: float) -> None:
        """Queue the deltas of one iteration for their readers; those of unknown requests are dropped."""
        for delta in deltas:
            ingress_id = self._routes.get(delta.request_id)
            if ingress_id is None:
                continue
            self._channels[ingress_id].add(delta)
            self._emitted[delta.request_id] += len(delta.token_ids)
            self._kept.note(delta, now_s)
            if delta.finish:
                self.forget([delta.request_id], now_s)

    def take(self, key: str, now_s: float) -> tuple[str, KeptStream | None]:
        """Give away the stream of this key: its request, for the engine to end, and its tokens. An ingress that has
        the request still hears that it ends here."""
        request_id, kept = self._kept.request_of(key), self._kept.take(key, now_s)
        if self.has(request_id):
            self._channels[self._routes[request_id]].add(Delta(request_id, (), "abort"))
            self.forget([request_id], now_s)
        return request_id, kept

    def fail(self, error: BaseException) -> None:
        """End every stream with ``error``, now and in future."""
        self._failure = error
        for channel in self._channels.values():
            channel.ready.set()

    async def stream(self, ingress_id: str, clock_s: Callable[[], float]) -> AsyncGenerator[Outputs]:
        """Messages for one ingress until it goes away or opens a newer stream. The newer one takes over what waits."""
        channel = Channel()
        if older := self._channels.get(ingress_id):
            channel.take_over(older)
            older.is_over = True
            older.ready.set()
        self._channels[ingress_id] = channel
        try:
            while not channel.is_over:
                if not channel.pending and self._failure is None:
                    await self._wait(channel)
                if self._failure is not None:
                    raise self._failure
                if not channel.is_over:
                    yield Outputs(self.steps, self.busy, channel.take(), self.load, self.draining, clock_s())
        finally:
            channel.closed_s = channel.closed_s or clock_s()

    async def _wait(self, channel: Channel) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._heartbeat_s):
                await channel.ready.wait()

    def orphans(self, now_s: float, grace_s: float) -> list[str]:
        """Requests whose ingress has had no open stream for ``grace_s``."""
        self._kept.expire(now_s)
        gone = {
            ingress_id
            for ingress_id, channel in self._channels.items()
            if channel.closed_s is not None and now_s - channel.closed_s > grace_s
        }
        orphans = [request_id for request_id, ingress_id in self._routes.items() if ingress_id in gone]
        for ingress_id in gone.difference(self._routes.values()):
            del self._channels[ingress_id]
        return orphans

    def take_finished(self) -> tuple[tuple[str, int], ...]:
        """Requests that ended since the last call, with their output tokens."""
        finished, self._finished = tuple(self._finished), []
        return finished
