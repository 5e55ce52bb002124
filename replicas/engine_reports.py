"""The one-way link on which an engine process pushes its iterations to its replica: unix datagrams, never blocking.

Pushed rather than polled, because a call into the engine waits for the iteration in flight.
"""

import asyncio
import math
import os
import select
import socket
import threading
from collections.abc import Callable, Sequence

import msgspec

from protocol.messages import Step

RECEIVE_BYTES = 1 << 20
PART_BYTES = 1 << 16  # of requests in one datagram; the kernel takes about 200 KB of a sender at a time
POSITION_BYTES = 32  # of a request beside its name, at most
LATE_POLL_S = 0.1  # between two looks at whether what waits for room has been overtaken
MAX_PENDING_STEPS = 1024  # kept while the replica does not read; older ones are dropped


class RequestState(msgspec.Struct, frozen=True, array_like=True):
    """Where one request is inside the engine."""

    request_id: str
    computed_tokens: int
    running: bool
    late: bool = False  # can no longer be on time: stands behind those that can
    settled_tokens: int = 0  # output made here that this position contains, or that a preemption left under way


class IterationReport(msgspec.Struct, frozen=True, array_like=True):
    """What the engine pushes after an iteration. ``requests`` are those told anew: all only now and then."""

    steps: int  # iterations since birth
    planning_s: float  # time spent on planning them, since birth
    kv_used_tokens: int
    planner_failures: int = 0  # steps since birth in which our part failed and vLLM's own order stood in
    drafts: int = 0  # draft tokens that a decode may verify per step
    acceptance: float = 0.0  # chance that one is accepted, that promises may count on
    lead_s: float = math.inf  # this and the next: when the next iteration is formed (``planning.limits``)
    lead_share: float = 0.0
    recent: tuple[Step, ...] = ()  # iterations since the last tick
    requests: tuple[RequestState, ...] | None = None


LEARNT = ("drafts", "acceptance", "lead_s", "lead_share")  # limits that the engine finds out


class IterationReportSender:
    """The engine's end. A tick that finds the queue full is merged into the next one; the last one before the engine
    idles, which none follows, waits for room in a thread of its own."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, RECEIVE_BYTES)
        self._socket.connect(path)
        self._lock = threading.Lock()
        self._told = 0  # ticks
        self._encoder = msgspec.msgpack.Encoder()
        self._pending: list[Step] = []
        self._behind: dict[str, int] = {}  # requests whose last position found the queue full, in order

    def send(self, tick: IterationReport, step: Step | None, requests: list[RequestState] | None) -> bool:
        """Push one tick with its step and requests, as several datagrams where those need them; false when a part was
        kept back.

        ``requests`` is not kept back: the next ones are fresher.
        """
        with self._lock:
            self._told += 1
            if step is not None:
                self._pending.append(step)
            return self._send(tick, requests)

    def _send(self, tick: IterationReport, requests: list[RequestState] | None) -> bool:
        parts = [None] if requests is None else split(sorted(requests, key=self._turn))
        for i, part in enumerate(parts):
            message = self._encoder.encode(msgspec.structs.replace(tick, recent=tuple(self._pending), requests=part))
            try:
                self._socket.send(message)
            except OSError:  # queue full, or the replica is gone
                del self._pending[:-MAX_PENDING_STEPS]
                left = [at.request_id for part in parts[i:] for at in part or ()]
                self._behind = {name: turn for turn, name in enumerate(left)} or self._behind
                if requests == []:
                    threading.Thread(target=self._send_late, args=(message, self._told), daemon=True).start()
                return False
            self._pending.clear()
        self._behind = self._behind if requests is None else {}
        return True

    def _send_late(self, message: bytes, told: int) -> None:
        """Send the last tick of an idle engine once there is room, unless a newer one has been told meanwhile."""
        room = select.poll()
        room.register(self._socket, select.POLLOUT)
        while True:
            room.poll(LATE_POLL_S * 1e3)
            with self._lock:
                if self._told != told:
                    return
                try:
                    self._socket.send(message)
                except BlockingIOError:
                    continue
                except OSError:  # the replica is gone
                    return
                self._pending.clear()
                return

    def _turn(self, at: RequestState) -> int:
        """What did not get through last time goes first, so that everything gets its turn."""
        return self._behind.get(at.request_id, len(self._behind))

    def close(self) -> None:
        """Stop sending."""
        with self._lock:
            self._told += 1
            self._socket.close()


class NoReports:
    """The sender of an engine without a replica around it."""

    def send(self, *_: object) -> bool:
        """Tell nobody."""
        return True

    def close(self) -> None:
        """Nothing to end."""


def report_sender(path: str) -> IterationReportSender | NoReports:
    """What reports to ``path``; to nobody where that is empty."""
    return IterationReportSender(path) if path else NoReports()


def split(requests: Sequence[RequestState]) -> list[tuple[RequestState, ...]]:
    """Requests in parts that fit into a datagram each; one empty part where there are none."""
    parts, size = [list[RequestState]()], 0
    for at in requests:
        size += len(at.request_id.encode()) + POSITION_BYTES
        if size > PART_BYTES and parts[-1]:
            parts.append([])
            size = len(at.request_id.encode()) + POSITION_BYTES
        parts[-1].append(at)
    return [tuple(part) for part in parts]


class IterationReportReceiver:
    """The replica's end: calls ``on_tick`` on the running event loop."""

    def __init__(self, path: str, on_tick: Callable[[IterationReport], None]) -> None:
        self.path = path
        self._on_tick = on_tick
        self._decoder = msgspec.msgpack.Decoder(IterationReport)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind(path)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.fileno(), self._receive)

    def _receive(self) -> None:
        while True:
            try:
                message = self._socket.recv(RECEIVE_BYTES)
            except BlockingIOError:
                return
            self._on_tick(self._decoder.decode(message))

    def close(self) -> None:
        """Stop receiving and remove the socket's path."""
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        if os.path.exists(self.path):
            os.unlink(self.path)
