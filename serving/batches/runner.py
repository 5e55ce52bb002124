"""Serves lines of batches in one ingress, through the application that clients reach, as requests of their tenants."""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import msgspec

from serving.batches.book import Given
from serving.batches.objects import BatchError, Line, LineResult
from serving.ingress.asgi import App, ClientGone, Message, answer_of, replayed
from serving.ingress.guard import ARRIVED
from serving.request.slo import strip_body
from serving.request.tenant import SENT_FOR

logger = logging.getLogger("polyslo.batches")

IDLE_S, BUSY_S = 1.0, 0.1  # between two questions for lines
FULL = frozenset({408, 429, 503})  # answers of a fleet without room, and with ``REASON`` any other: ``overload_status``
REASON = b"x-slo-reason"  # header of a refusal
TRIES = (
    3  # of a line: then its place goes to others for a while, or, where an engine failed with it, that is its result
)
LONGEST_PAUSE_S = 30.0
TIER = "flex"  # OpenAI's word for best effort


class Keeper(Protocol):
    """Where lines come from."""

    async def ask(self, method: str, *arguments: Any) -> Any: ...


class BatchRunner:
    """Has up to ``in_flight`` lines served at a time; ``count`` is told of every one, whether it was good."""

    def __init__(
        self, app: App, keeper: Keeper, worker: str, in_flight: int, count: Callable[[bool], None] = lambda _good: None
    ) -> None:
        self._app, self._keeper, self._worker, self._in_flight, self._count = app, keeper, worker, in_flight, count
        self._serving: dict[asyncio.Task[None], Line] = {}
        self._results: list[LineResult] = []
        self._unserved: list[tuple[str, int]] = []  # batch and number of lines for which there was no room

    async def run(self) -> None:
        """Until it is cancelled."""
        try:
            while True:
                try:
                    given = await self._exchange()
                    pause_s = BUSY_S if given.lines or self._serving else IDLE_S
                except BatchError:  # told by the link; results are kept until it answers again
                    pause_s = IDLE_S
                except Exception:
                    logger.exception("lines of batches are not exchanged")
                    pause_s = IDLE_S
                await asyncio.sleep(pause_s)
        finally:
            for task in self._serving:
                task.cancel()

    async def _exchange(self) -> Given:
        """Hand results over, end what need not be served any more, and begin new lines."""
        results, unserved = list(self._results), list(self._unserved)
        if results or unserved:
            await self._keeper.ask("take_back", self._worker, results, unserved)
            del self._results[: len(results)], self._unserved[: len(unserved)]
        waiting = [(result.batch_id, result.number) for result in self._results] + self._unserved
        held = {(line.batch_id, line.number) for line in self._serving.values()}.union(waiting)
        free = self._in_flight - len(self._serving)
        given = Given(*await self._keeper.ask("give", self._worker, free, held))
        for task, line in list(self._serving.items()):
            if line.batch_id in given.ended:
                task.cancel()
        for line in given.lines:
            task = asyncio.get_running_loop().create_task(self._serve(line))
            self._serving[task] = line
            task.add_done_callback(self._serving.pop)
        return given

    async def _serve(self, line: Line) -> None:
        """One line until it has an answer that stands, or has found the fleet full several times."""
        request_id, full, failed = f"batch_req_{secrets.token_hex(8)}", 0, 0
        while True:
            status, headers, body = await self._answered(line, request_id)
            is_full = status in FULL or REASON in headers
            full, failed = full + is_full, failed + (status >= 500 and not is_full)
            if full >= TRIES:
                self._unserved.append((line.batch_id, line.number))
                return
            if not is_full and (status < 500 or failed >= TRIES):
                break
            await asyncio.sleep(_pause_s(headers, full + failed))
        self._results.append(LineResult(line.batch_id, line.number, request_id, status, body))
        self._count(status == 200)

    async def _answered(self, line: Line, request_id: str) -> tuple[int, dict[bytes, bytes], bytes]:
        body = best_effort(line.body)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        scope: Message = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": line.endpoint,
            "raw_path": line.endpoint.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [*headers, (b"x-request-id", request_id.encode())],
            "client": None,
            "server": None,
            ARRIVED: time.monotonic(),
            SENT_FOR: line.tenant,
        }
        try:
            answer = await answer_of(self._app, scope, replayed(body, _silent))
        except ClientGone:
            return 500, {}, _failure("The request got no answer.")
        except Exception as error:
            logger.warning("a line of %s failed: %r", line.batch_id, error)
            return 500, {}, _failure("The request failed.")
        return answer.status, dict(answer.start.get("headers", ())), _as_json(answer.body)


def best_effort(body: bytes) -> bytes:
    """The body of a request without an objective of its own, as best effort; one that is no object as it is."""
    try:
        document = msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return body
    if not isinstance(document, dict):
        return body
    return msgspec.json.encode({**strip_body(document), "service_tier": TIER})


def _pause_s(headers: dict[bytes, bytes], attempt: int) -> float:
    """As long as the answer says, or longer each time."""
    told = headers.get(b"retry-after", b"")
    return float(told) if told.isdigit() else min(2.0**attempt, LONGEST_PAUSE_S)


def _as_json(body: bytes) -> bytes:
    """A body that is JSON, so that it can stand in a line."""
    try:
        msgspec.json.decode(body, type=msgspec.Raw)
        return body.replace(b"\n", b" ")  # between values alone: strings have none
    except msgspec.MsgspecError:
        return msgspec.json.encode(body.decode(errors="replace"))


def _failure(message: str) -> bytes:
    error = {"message": message, "type": "server_error", "param": None, "code": "engine_error"}
    return msgspec.json.encode({"error": error})


async def _silent() -> Message:
    """A client that waits for its answer."""
    never: Awaitable[None] = asyncio.get_running_loop().create_future()
    await never
    raise AssertionError
