"""The load generator: an open loop that sends each request at its time, whatever became of those before.

Latency counts from the time a request was due, so a client that falls behind shows as latency, never as less load; how
far each send was behind is recorded.
"""

import asyncio
import math
import os
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum

import aiohttp
import msgspec

from serving.ingress.errors import NO_REPLICA
from serving.loadgen.stream import SloEcho, StreamReader

PREPARED_AHEAD = 64  # request bodies built while waiting, so that sending costs little
KEEP_ALIVE_S = 2.0  # shorter than servers' own, so that no request goes out on a connection being closed


def authorization() -> dict[str, str]:
    """Headers with the key that ``VLLM_API_KEY`` names, as vLLM's server asks for it; none without one."""
    key = os.environ.get("VLLM_API_KEY", "")
    return {"authorization": f"Bearer {key}"} if key else {}


class Status(StrEnum):
    """What became of a request."""

    FINISHED = "finished"
    REFUSED = "refused"
    ERROR = "error"
    UNFINISHED = "unfinished"


@dataclass(frozen=True)
class Call:
    """One request to send. ``body`` builds the JSON when it is needed."""

    request: int
    due_s: float  # from the start of the replay
    headers: dict[str, str]
    body: Callable[[], bytes]


@dataclass(slots=True)
class Record:
    """What the client saw of one request. Times are seconds from the start of the replay."""

    request: int
    due_s: float
    sent_s: float
    status: Status = Status.UNFINISHED
    http_status: int = 0
    end_s: float = math.nan
    detail: str = ""  # the reason of a refusal, the message of an error
    retry_after_s: float = math.nan
    returns: int = 0  # how often it was refused and sent again before
    chunk_s: "array[float]" = field(default_factory=lambda: array("d"))
    chunk_tokens: "array[int]" = field(default_factory=lambda: array("l"))
    is_estimated: bool = False
    service_tier: str = ""
    slo: SloEcho | None = None
    is_promised: bool = False  # as its headers said, also where the answer broke off

    def take(self, stream: StreamReader) -> None:
        """Copy what the stream has seen so far."""
        self.chunk_s, self.chunk_tokens = stream.chunk_s, stream.chunk_tokens
        self.is_estimated, self.service_tier, self.slo = stream.is_estimated, stream.service_tier, stream.slo


class Client:
    """Sends calls over one session; ``records`` holds those sent so far, in order of sending."""

    def __init__(self, url: str, concurrency_limit: int | None = None, return_within_s: float = 0.0) -> None:
        """``return_within_s``: who is refused and told to come back within so long does, as a request of its own."""
        self.url = url
        self._return_within_s = return_within_s
        self.records: list[Record] = []
        self.finished = 0
        self._slots = asyncio.Semaphore(concurrency_limit) if concurrency_limit else None
        self._running: set[asyncio.Task[None]] = set()
        self._start_s = 0.0
        self._defect: BaseException | None = None

    async def run(self, calls: Iterable[Call], grace_s: float = math.inf) -> None:
        """Send all calls and wait for their answers, at most ``grace_s`` after the last send.

        Cancelling ends the replay early; whatever has not been answered by then stays ``UNFINISHED``.
        """
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=30.0)
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, auto_decompress=False, headers=authorization()
        ) as session:
            self._start_s = time.perf_counter()
            try:
                await self._send_all(session, calls)
                if self._running:
                    await asyncio.wait(self._running, timeout=None if math.isinf(grace_s) else grace_s)
            finally:
                await self._stop()
        if self._defect:
            raise self._defect

    def now_s(self) -> float:
        """Seconds since the start of the replay."""
        return time.perf_counter() - self._start_s

    async def _send_all(self, session: aiohttp.ClientSession, calls: Iterable[Call]) -> None:
        ahead: deque[tuple[Call, bytes]] = deque()
        rest = iter(calls)
        upcoming = next(rest, None)
        while ahead or upcoming:
            if upcoming and (not ahead or (len(ahead) < PREPARED_AHEAD and ahead[0][0].due_s > self.now_s())):
                ahead.append((upcoming, upcoming.body()))
                upcoming = next(rest, None)
                await asyncio.sleep(0)
                continue
            call, body = ahead.popleft()
            await asyncio.sleep(max(0.0, call.due_s - self.now_s()))
            if self._slots:
                await self._slots.acquire()
            task = asyncio.create_task(self._send(session, call, body))
            self._running.add(task)
            task.add_done_callback(self._note_done)

    async def _send(self, session: aiohttp.ClientSession, call: Call, body: bytes) -> None:
        record, due_s, returns = await self._send_once(session, call, body, call.due_s, 0), math.nan, 0
        while record.status == Status.REFUSED and 0 < record.retry_after_s <= self._return_within_s:
            due_s, returns = record.end_s + record.retry_after_s, returns + 1
            await self._wait_without_slot(due_s)
            record = await self._send_once(session, call, body, due_s, returns)

    async def _wait_without_slot(self, until_s: float) -> None:
        """Nothing is in flight until then: another request may have the slot."""
        if self._slots:
            self._slots.release()
        await asyncio.sleep(until_s - self.now_s())
        if self._slots:
            await self._slots.acquire()

    async def _send_once(
        self, session: aiohttp.ClientSession, call: Call, body: bytes, due_s: float, returns: int
    ) -> Record:
        record = Record(call.request, due_s, self.now_s(), returns=returns)
        self.records.append(record)
        stream = StreamReader()
        try:
            async with session.post(self.url, data=body, headers=call.headers) as response:
                record.http_status = response.status
                record.is_promised = response.headers.get("x-slo-promised") == "true"
                if response.status == 200:
                    await self._read(response, stream)
                    record.detail = stream.failure()
                    record.status = Status.ERROR if record.detail else Status.FINISHED
                else:
                    await _note_rejection(record, response)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            record.status, record.detail = Status.ERROR, f"{type(error).__name__}: {error}".rstrip(": ")
        finally:
            record.take(stream)
            record.end_s = self.now_s()
        return record

    async def _read(self, response: aiohttp.ClientResponse, stream: StreamReader) -> None:
        async for data in response.content.iter_any():
            stream.feed(data, self.now_s())

    def _note_done(self, task: "asyncio.Task[None]") -> None:
        self._running.discard(task)
        self.finished += 1
        if not task.cancelled():
            self._defect = self._defect or task.exception()
        if self._slots:
            self._slots.release()

    async def _stop(self) -> None:
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _note_rejection(record: Record, response: aiohttp.ClientResponse) -> None:
    reason = response.headers.get("x-slo-reason", "")
    is_refusal = response.status == 429 or (bool(reason) and reason != NO_REPLICA)
    record.status = Status.REFUSED if is_refusal else Status.ERROR
    message = _error_message(await response.read())
    record.detail = (reason or message or "refused") if is_refusal else f"HTTP {response.status}: {message}"
    try:
        record.retry_after_s = float(response.headers.get("retry-after", "nan"))
    except ValueError:
        record.retry_after_s = math.nan  # an HTTP date: not what this server sends


def _error_message(body: bytes) -> str:
    try:
        told = msgspec.json.decode(body)
        return str(told["error"]["message"])
    except (msgspec.MsgspecError, UnicodeError, KeyError, TypeError):
        return " ".join(body[:200].decode(errors="replace").split())
