"""ASGI middleware around vLLM's OpenAI server: SLO in, verdict out. Never touches a prompt; Serve echoes request ids.

The response of a generating endpoint is held until its admission decision is known (the responses API announces itself
before): a refusal replaces it with 429 (or 503); anything else gains ``service_tier`` and the ``slo`` object.
"""

import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from types import MappingProxyType
from typing import Any

import msgspec

from serving.annotate import StreamAnnotator, annotate_json
from serving.errors import ApiError, bad_request, refused
from serving.program import read_program
from serving.sequences import expected_sequences
from serving.slo import SloError, TierIndex, resolve, strip_body
from serving.tenant import tenant_of
from serving.ticket import Ticket, current_ticket

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

GENERATING = frozenset(
    {
        "/v1/chat/completions",
        "/v1/chat/completions/batch",  # several conversations, each a sequence of one request as with n > 1
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/invocations",  # SageMaker's name for whichever of these the body fits
    }
)


class SloMiddleware:
    """``tiers()`` gives the tier table in force; ``done(ticket, status)`` is told of every finished response.

    ``has_tenants``: the application checks API keys, so that a key tells who asks.
    """

    def __init__(
        self,
        app: App,
        tiers: Callable[[], TierIndex],
        done: Callable[[Ticket, int], None],
        overload_status: int = 429,
        has_tenants: bool = False,
    ) -> None:
        self.app, self.tiers, self.done, self.overload_status = app, tiers, done, overload_status
        self.has_tenants = has_tenants

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in GENERATING:
            await self.app(scope, receive, send)
            return
        body = await read_body(receive)
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
        try:
            ticket, body = self._open(headers, body)
            ticket.tenant = tenant_of(scope["path"], headers) if self.has_tenants else ""
        except SloError as error:
            await send_error(send, bad_request(str(error), error.field))
            return
        response = Response(ticket, send, self.overload_status)
        token = current_ticket.set(ticket)
        try:
            await self.app(with_length(scope, len(body)), replayed(body, receive), response)
        finally:
            current_ticket.reset(token)
            self.done(ticket, response.status)

    def _open(self, headers: list[tuple[str, str]], body: bytes) -> tuple[Ticket, bytes]:
        """The request's ticket, and its body without what only the door understands."""
        try:
            document = json.loads(body)
        except ValueError:
            document = None
        known = document if isinstance(document, dict) else {}  # vLLM's own error says what is wrong with the rest
        slo = resolve(headers, known, self.tiers())
        ticket = Ticket(slo, program=read_program(headers, known), expected=expected_sequences(known), is_open=True)
        stripped = strip_body(known)
        return ticket, body if stripped is known else json.dumps(stripped).encode()


class Response:
    """The ``send`` of one request: holds the start, swaps in a refusal, annotates the rest."""

    def __init__(self, ticket: Ticket, send: Send, overload_status: int) -> None:
        self.ticket, self.send = ticket, send
        self.overload_status, self.status = overload_status, 0
        self._start: Message | None = None
        self._stream: StreamAnnotator | None = None
        self._json: list[bytes] | None = None
        self._replaced = False
        self._held = b""

    async def __call__(self, message: Message) -> None:
        if self._replaced:
            return
        if message["type"] == "http.response.start":
            self._start = message
        elif message["type"] == "http.response.body":
            await self._body(bytes(message.get("body", b"")), not message.get("more_body", False))
        else:
            await self.send(message)

    async def _body(self, data: bytes, last: bool) -> None:
        if not self.ticket.decisions and not last:
            self._held += data
            return
        data, self._held = self._held + data, b""
        if self._start is not None and self.status == 0 and await self._begin():
            return
        if self._stream is not None:
            data = self._stream.feed(data, last)
        elif self._json is not None:
            self._json.append(data)
            if not last:
                return
            data = annotate_json(b"".join(self._json), self.ticket)
            await self._send_start(len(data))
        await self.send({"type": "http.response.body", "body": data, "more_body": not last})

    async def _begin(self) -> bool:
        """At the first body chunk; whether a refusal took the response's place."""
        assert self._start is not None
        refusal = self.ticket.refusal
        if refusal is not None:
            self._replaced = True
            error = refused(refusal, self.overload_status)
            self.status = error.status
            await send_error(self.send, error)
            return True
        self.status = int(self._start["status"])
        kind = dict(self._start.get("headers", [])).get(b"content-type", b"")
        if kind.startswith(b"text/event-stream"):
            self._stream = StreamAnnotator(self.ticket)
            await self._send_start(None)
        elif kind.startswith(b"application/json"):
            self._json = []
        else:
            await self._send_start(None)
        return False

    async def _send_start(self, length: int | None) -> None:
        assert self._start is not None
        headers = list(self._start.get("headers", []))
        if length is not None:
            headers = [(name, value) for name, value in headers if name.lower() != b"content-length"]
            headers.append((b"content-length", str(length).encode()))
        await self.send({**self._start, "headers": headers})


async def read_body(receive: Receive) -> bytes:
    """The whole request body."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return b"".join(parts)
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def replayed(body: bytes, receive: Receive) -> Receive:
    """A ``receive`` that gives ``body`` once and then whatever follows (the disconnect)."""
    fresh = [True]

    async def again() -> Message:
        if fresh:
            fresh.clear()
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return again


def with_length(scope: Message, length: int) -> Message:
    """The scope with the content length of the rewritten body."""
    headers = [(name, value) for name, value in scope["headers"] if name.lower() != b"content-length"]
    return {**scope, "headers": [*headers, (b"content-length", str(length).encode())]}


async def send_error(send: Send, error: ApiError) -> None:
    """A complete error response."""
    await send_json(send, error.status, error.body, error.headers)


async def send_json(send: Send, status: int, document: Any, headers: Mapping[str, str] = MappingProxyType({})) -> None:
    """A complete JSON response."""
    body = msgspec.json.encode(document)
    told = {"content-type": "application/json", "content-length": str(len(body)), **headers}
    raw = [(name.encode(), value.encode("latin-1", "replace")) for name, value in told.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body, "more_body": False})
