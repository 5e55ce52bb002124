"""JSON errors of vLLM's server, in the shape that the clients of a path expect; and how a response begins."""

from serving.ingress.annotate import mend_error
from serving.ingress.asgi import Message, Send


class MendedErrors:
    """The ``send`` of a request: JSON errors of vLLM's server in the shape that the path's clients expect."""

    def __init__(self, send: Send, path: str) -> None:
        self.send, self.path = send, path
        self._start: Message | None = None
        self._parts: list[bytes] = []

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start" and (is_stream(message) or is_error(message)):
            self._start = message  # a stream begins with its first event: before that, vLLM may find a mistake
            return
        if message["type"] == "http.response.body" and (start := self._start) is not None:
            if is_error(start):
                await self._error(message, start)
                return
            self._start = None
            await self.send(start)
        await self.send(message)

    async def _error(self, message: Message, start: Message) -> None:
        self._parts.append(bytes(message.get("body", b"")))
        if not message.get("more_body", False):
            data = mend_error(b"".join(self._parts), start["status"], self.path)
            await self.send(resized(start, len(data)))
            await self.send({"type": "http.response.body", "body": data, "more_body": False})


def is_error(start: Message) -> bool:
    """Whether the response that begins so is an error as JSON."""
    return bool(start["status"] >= 400) and is_json(start)


def is_json(start: Message) -> bool:
    """Whether the response that begins so is a JSON document."""
    return _has_type(start, b"application/json")


def is_stream(start: Message) -> bool:
    """Whether the response that begins so is a stream of events."""
    return _has_type(start, b"text/event-stream")


def _has_type(start: Message, kind: bytes) -> bool:
    return bool(dict(start.get("headers", [])).get(b"content-type", b"").startswith(kind))


def resized(start: Message, length: int) -> Message:
    """A response's start with another content length."""
    headers = [(name, value) for name, value in start.get("headers", []) if name.lower() != b"content-length"]
    return {**start, "headers": [*headers, (b"content-length", str(length).encode())]}
