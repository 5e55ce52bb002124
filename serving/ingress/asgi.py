"""ASGI in small pieces: types, whole bodies, complete answers. Knows no SLO and no vLLM."""

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from serving.ingress.errors import ApiError

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


class ClientGone(Exception):
    """The client left before its request was complete."""


async def read_body(receive: Receive, most_bytes: float = float("inf")) -> bytes | None:
    """The whole request body, None where it is longer than ``most_bytes``; raises ``ClientGone``."""
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise ClientGone
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > most_bytes:
            return None
        if not message.get("more_body", False):
            return b"".join(parts)


def replayed(body: bytes, receive: Receive) -> Receive:
    """A ``receive`` that gives ``body`` once, which it holds no longer, and then whatever follows (the disconnect)."""
    fresh = [body]

    async def again() -> Message:
        if fresh:
            return {"type": "http.request", "body": fresh.pop(), "more_body": False}
        return await receive()

    return again


def headers_of(scope: Message) -> list[tuple[str, str]]:
    """The headers as text: most clients send other letters as UTF-8, some as Latin-1."""
    return [(name.decode("latin-1"), _text(value)) for name, value in scope["headers"]]


def _text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def with_length(scope: Message, length: int) -> Message:
    """The scope with the content length of a rewritten body."""
    headers = [(name, value) for name, value in scope["headers"] if name.lower() != b"content-length"]
    return {**scope, "headers": [*headers, (b"content-length", str(length).encode())]}


async def send_error(send: Send, error: ApiError, path: str = "") -> None:
    """A complete error response, in the shape that clients of ``path`` expect."""
    await send_json(send, error.status, error.body_for(path), error.headers)


async def send_json(send: Send, status: int, document: Any, headers: Mapping[str, str] = MappingProxyType({})) -> None:
    """A complete JSON response."""
    body = msgspec.json.encode(document)
    told = {"content-type": "application/json", "content-length": str(len(body)), **headers}
    raw = [(name.encode(), value.encode("latin-1", "replace")) for name, value in told.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body, "more_body": False})


class Answer(NamedTuple):
    """A whole response: its first message, and its body."""

    start: Message
    body: bytes

    @property
    def status(self) -> int:
        return int(self.start["status"])


async def answer_of(app: App, scope: Message, receive: Receive) -> Answer:
    """What ``app`` answers, for a caller that sends something else; raises ``ClientGone`` where it answers nothing."""
    starts, parts = list[Message](), list[bytes]()

    async def keep(message: Message) -> None:
        if message["type"] == "http.response.start":
            starts.append(message)
        elif message["type"] == "http.response.body":
            parts.append(bytes(message.get("body", b"")))

    await app(dict(scope), receive, keep)
    if not starts:
        raise ClientGone
    return Answer(starts[0], b"".join(parts))
