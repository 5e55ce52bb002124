"""The end of all sockets that listens: one address, one channel for each process that is listened to. No ray here.

An ingress hears tokens of replicas and asks the controller; a controller hears reports. All messages that have come are
taken together, at most ``MOST_AT_ONCE`` in one event-loop tick.
"""

import asyncio
import logging
from collections.abc import Callable

import msgspec
import zmq

from protocol.links import (
    HEARTBEAT_MS,
    MOST_CALLS,
    MOST_QUEUED,
    NO_ANSWER,
    SILENT_MS,
    Answer,
    Call,
    Kind,
    Link,
    new_channel,
    opened,
)

logger = logging.getLogger("polyslo.dispatch")

MOST_AT_ONCE = 256  # messages in one event-loop tick
MOST_BYTES = 64 << 20  # of a message; a longer one ends its connection

_answer = msgspec.msgpack.Decoder(Answer)

Receive = Callable[[memoryview], None]
Post = Callable[[bytes, bytes], None]


class Channel:
    """One replica's messages, in order, and calls of it; ``broken`` is set where a message is missing or unreadable."""

    def __init__(self, link: Link, receive: Receive, post: Post) -> None:
        self.link, self._receive, self._post = link, receive, post
        self._taken = self._called = 0
        self._calls: dict[int, asyncio.Future[bytes]] = {}
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def is_up(self) -> bool:
        """Whether the replica has spoken, so that it can be called."""
        return self._taken > 0 and not self.broken.done()

    async def call(self, method: str, body: bytes) -> bytes:
        """Have the replica do something; raises ``ConnectionError`` where it does not, or its answer does not come."""
        self._called += 1
        number, answer = self._called, asyncio.get_running_loop().create_future()
        self._calls[number] = answer
        try:
            self._post(self.link.channel, msgspec.msgpack.encode(Call(number, method, body)))
            return bytes(await answer)
        finally:
            self._calls.pop(number, None)

    def tell(self, method: str, body: bytes) -> None:
        """``call`` without an answer; raises ``ConnectionError`` where nobody is connected."""
        self._post(self.link.channel, msgspec.msgpack.encode(Call(NO_ANSWER, method, body)))

    def close(self) -> None:
        """Take nothing more; open calls fail."""
        self.broken.cancel()
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(ConnectionError("channel closed"))

    def take(self, message: bytes) -> None:
        """Pass a message on, unless the channel has broken."""
        if self.broken.done():
            return
        try:
            number, kind, content = opened(message)
            if number != self._taken:
                raise ConnectionError(f"message {self._taken} is lost: {number} came")
            self._taken += 1
            if kind == Kind.OUTPUTS:
                self._receive(content)
            elif kind == Kind.ANSWER:
                self._take_answer(_answer.decode(content))
        except Exception as error:
            self.broken.set_exception(error)

    def _take_answer(self, answer: Answer) -> None:
        waiting = self._calls.get(answer.number)
        if waiting is None or waiting.done():
            return
        if answer.error:
            waiting.set_exception(ConnectionError(answer.error))
        else:
            waiting.set_result(answer.body)


class TokenHub:
    """Listens on a port of ``host`` that the system chooses; must be made on a running event loop."""

    def __init__(self, host: str, most_at_once: int = MOST_AT_ONCE) -> None:
        """Raises ``zmq.ZMQError`` where ``host`` is not an address of this machine."""
        self._channels: dict[bytes, Channel] = {}
        self._most_at_once = most_at_once
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        public_key, secret_key = zmq.curve_keypair()
        self._key = public_key
        self._socket.curve_secretkey, self._socket.curve_publickey = secret_key, public_key
        self._socket.curve_server = True
        self._socket.sndhwm, self._socket.rcvhwm = MOST_CALLS, MOST_QUEUED
        self._socket.router_mandatory = True
        self._socket.maxmsgsize = MOST_BYTES
        self._socket.heartbeat_ivl, self._socket.heartbeat_timeout = HEARTBEAT_MS, SILENT_MS
        self._socket.ipv6 = ":" in host
        self._socket.bind(f"tcp://[{host}]:*" if ":" in host else f"tcp://{host}:*")
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._loop.add_reader(self._socket.fileno(), self._read)
        self._read()  # it signals what comes after it was found empty

    def open(self, receive: Receive) -> Channel:
        """A channel whose ``link`` is to be told to one replica."""
        channel = Channel(Link(self.address, self._key, new_channel()), receive, self._post)
        self._channels[channel.link.channel] = channel
        return channel

    def close_channel(self, channel: Channel) -> None:
        """Hear nothing more of it; late messages are dropped."""
        self._channels.pop(channel.link.channel, None)
        channel.close()

    def close(self) -> None:
        """Stop listening."""
        if self._socket.closed:
            return
        self._loop.remove_reader(self._socket.fileno())
        for channel in list(self._channels.values()):
            self.close_channel(channel)
        self._context.destroy(linger=0)

    def _post(self, channel: bytes, message: bytes) -> None:
        try:
            self._socket.send_multipart((channel, message), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise ConnectionError(f"the other end cannot be called: {error}") from None
        self._loop.call_soon(self._read)  # sending may have taken the signal of what has come

    def _read(self) -> None:
        """Take what has come. The socket tells of new messages once, so it is read until it is empty."""
        if self._socket.closed:
            return
        for _ in range(self._most_at_once):
            try:
                sender, *parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            channel = self._channels.get(sender)
            if channel is not None and len(parts) == 1:
                channel.take(parts[0])
        self._loop.call_soon(self._read)
