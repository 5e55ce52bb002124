"""The end of a link that connects: sends messages to an ingress or a controller, and answers its calls."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from types import TracebackType

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from protocol.links import (
    CONNECT_MS,
    HEARTBEAT_MS,
    MOST_CALLS,
    MOST_QUEUED,
    NO_ANSWER,
    SILENT_MS,
    Answer,
    Call,
    Kind,
    Link,
    enveloped,
)

FAILED = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
MOST_ERROR = 300  # characters of an error that travel

logger = logging.getLogger("polyslo.link")
_context = zmq.Context()
_context.set(zmq.MAX_SOCKETS, _context.get(zmq.SOCKET_LIMIT))  # a link takes three, of 1023 by default
_call = msgspec.msgpack.Decoder(Call)

Serve = Callable[[str, bytes], Awaitable[bytes]]


async def serve_nothing(method: str, body: bytes) -> bytes:
    """For links on which nothing is called."""
    raise ValueError(f"unknown method {method!r}")


class TokenLink:
    """One connection, used as a context manager. It is made once: what breaks it ends its channel.

    ``serve`` answers the calls of the ingress. ``send`` waits while ``MOST_QUEUED`` messages are on their way, so that
    a slow reader costs no memory here.
    """

    def __init__(self, link: Link, serve: Serve = serve_nothing) -> None:
        """Raises ``ConnectionError`` for a link that cannot be used."""
        self._address, self._serve = link.address, serve
        self._sent = 0
        self._is_broken = False
        self._changed = asyncio.Event()
        self._answering: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._sockets = contextlib.ExitStack()  # closes those that were opened
        try:
            self._open()
            self._configure(link)
            self._socket.connect(link.address)
        except (zmq.ZMQError, ValueError) as error:
            self._sockets.close()
            raise ConnectionError(f"{link.address} cannot be reached: {error}") from None
        self._offer(Kind.HELLO, b"")
        for socket, read in ((self._socket, self._read), (self._monitor, self._watch)):
            self._loop.add_reader(socket.fileno(), read)
            read()  # a socket signals what comes after it was found empty

    def _open(self) -> None:
        self._socket = _context.socket(zmq.DEALER)
        self._sockets.callback(self._socket.close, linger=0)
        self._monitor = self._socket.get_monitor_socket(FAILED)
        self._sockets.callback(self._monitor.close, linger=0)
        self._sockets.callback(self._socket.disable_monitor)

    def _configure(self, link: Link) -> None:
        socket = self._socket
        socket.identity = link.channel
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        socket.curve_serverkey = link.key
        socket.sndhwm, socket.rcvhwm = MOST_QUEUED, MOST_CALLS
        socket.reconnect_ivl = -1
        socket.connect_timeout, socket.handshake_ivl = CONNECT_MS, CONNECT_MS
        socket.heartbeat_ivl, socket.heartbeat_timeout = HEARTBEAT_MS, SILENT_MS
        socket.ipv6 = "[" in link.address

    def __enter__(self) -> "TokenLink":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._answering:
            task.cancel()
        for socket in (self._socket, self._monitor):
            self._loop.remove_reader(socket.fileno())
        self._sockets.close()

    async def send(self, message: bytes, kind: Kind = Kind.OUTPUTS) -> None:
        """Pass a message on; raises ``ConnectionError`` where the ingress is gone."""
        while True:
            if self._is_broken:
                raise ConnectionError(f"the connection to {self._address} is broken")
            self._changed.clear()
            if self._offer(kind, message):
                self._loop.call_soon(self._read)  # sending may have taken the signal of what has come
                return
            if not self._events() & zmq.POLLOUT:
                await self._changed.wait()

    async def broken(self) -> None:
        """Return when the ingress is gone."""
        while not self._is_broken:
            self._changed.clear()
            await self._changed.wait()

    def _offer(self, kind: Kind, message: bytes) -> bool:
        """Whether the socket has taken a message."""
        try:
            self._socket.send(enveloped(self._sent, kind, message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        self._sent += 1
        return True

    def _events(self) -> int:
        return int(self._socket.getsockopt(zmq.EVENTS))

    def _read(self) -> None:
        """Something about the socket has changed; asking for it is what ends the signal."""
        while not self._socket.closed and self._events() & zmq.POLLIN:
            call = _call.decode(self._socket.recv(zmq.NOBLOCK))
            task = self._loop.create_task(self._answer(call))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)
        self._changed.set()

    async def _answer(self, call: Call) -> None:
        try:
            answer = Answer(call.number, await self._serve(call.method, call.body))
        except Exception as error:
            answer = Answer(call.number, b"", repr(error)[:MOST_ERROR])
        if call.number == NO_ANSWER:
            return
        try:
            await self.send(msgspec.msgpack.encode(answer), Kind.ANSWER)
        except ConnectionError as error:
            logger.info("answer lost: %r", error)

    def _watch(self) -> None:
        """Take what the connection's monitor says: each of its events is an end."""
        while self._monitor.poll(0):
            recv_monitor_message(self._monitor, zmq.NOBLOCK)
            self._is_broken = True
        self._changed.set()
