"""``/v1/files`` and ``/v1/batches`` in front of an ingress's application. OpenAI's shapes; everything else passes on.

Who may ask is the application's to say: each of these requests is let in if ``GET /v1/models`` with its headers is.
"""

import asyncio
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any, NamedTuple
from urllib.parse import parse_qs

import msgspec
from starlette.formparsers import MultiPartException
from starlette.requests import Request

from serving.batches.file_book import MOST_FILES
from serving.batches.objects import BatchError
from serving.batches.runner import Keeper
from serving.batches.wanted import of_form, read_expiry, read_page
from serving.ingress.asgi import (
    App,
    ClientGone,
    Message,
    Receive,
    Send,
    answer_of,
    read_body,
    replayed,
    send_error,
    send_json,
)
from serving.ingress.errors import AGAIN_S, ApiError
from serving.ingress.ingress import within_prefix
from serving.ingress.limits import FILES, takes_file
from serving.request.slo import encodable
from serving.request.tenant import tenant_of

BATCHES, MODELS = "/v1/batches", "/v1/models"
OFF = "Batches are off: set batches.storage in the application's args."
PURPOSE, EXPIRY = "batch", "expires_after"
LONGEST_NAME = 256
MOST_LISTED = 100  # batches at a time
PIECE, CUT = 4 << 20, 1 << 16  # bytes of a file that are sent at a time, and of a form that are parsed at a time

Handler = Callable[["Asked"], Awaitable[Any]]


class Asked:
    """One request for files or batches: whose it is, what it names, its query, its body."""

    def __init__(self, tenant: str, name: str, scope: Message, receive: Receive) -> None:
        self.tenant, self.name, self.scope, self.receive = tenant, name, scope, receive
        self.query = {key: values[-1] for key, values in parse_qs(scope["query_string"].decode("latin-1")).items()}


class Content(NamedTuple):
    """A file that is sent as it is, piece by piece."""

    size: int
    first: bytes  # piece
    read: Callable[[int], Awaitable[bytes]]  # another one, from this byte on


class BatchApi:
    """``keeper`` None: there are no batches here. ``around``: what stands before its own routes, limits and answers to
    browsers. ``has_tenants``: the application checks API keys."""

    def __init__(self, app: App, keeper: Keeper | None, around: Callable[[App], App], has_tenants: bool) -> None:
        self.app, self._keeper, self._has_tenants = app, keeper, has_tenants
        self._guarded = around(self._answer)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        inner = within_prefix(scope) if scope["type"] == "http" else scope
        if scope["type"] == "http" and (_below(inner["path"], FILES) or _below(inner["path"], BATCHES)):
            await self._guarded(inner, receive, send)
        elif scope["type"] == "http" and scope["method"] == "POST" and takes_file(scope["path"]):
            await send_error(send, ApiError(404, "Files go to /v1/files.", "invalid_request_error", None, "not_found"))
        else:
            await self.app(scope, receive, send)

    async def _answer(self, scope: Message, receive: Receive, send: Send) -> None:
        try:
            if (refusal := await self._not_let_in(scope)) is not None:
                await send(refusal.start)
                await send({"type": "http.response.body", "body": refusal.body, "more_body": False})
                return
            told = await self._handled(scope, receive)
        except BatchError as error:
            await send_error(send, as_told(error))
        except ClientGone:
            return
        else:
            await _send(send, told)

    async def _not_let_in(self, scope: Message) -> Any:
        """The application's answer to who may not ask; None lets in."""
        asked = {**scope, "method": "GET", "path": MODELS, "raw_path": MODELS.encode(), "query_string": b""}
        answer = await answer_of(self.app, asked, replayed(b"", _gone))
        return None if answer.status == 200 else answer

    async def _handled(self, scope: Message, receive: Receive) -> Any:
        if self._keeper is None:
            raise BatchError(404, OFF, None, "batches_off")
        parts = scope["path"].strip("/").split("/")[1:]  # without v1
        name, rest = [*parts, "", ""][1], "/".join(parts[2:])
        handler = self._route(parts[0], scope["method"], bool(name), rest)
        if handler is None:
            raise BatchError(404, f"No route {scope['method']} {scope['path'][:200]}.", None, "not_found")
        headers = [(key.decode("latin-1"), value.decode("latin-1")) for key, value in scope["headers"]]
        tenant = tenant_of(scope["path"], headers) if self._has_tenants else ""
        return await handler(Asked(tenant, name, scope, receive))

    def _route(self, kind: str, method: str, has_name: bool, rest: str) -> Handler | None:
        routes: dict[tuple[str, str, bool, str], Handler] = {
            ("files", "POST", False, ""): self._upload,
            ("files", "GET", False, ""): self._list_files,
            ("files", "GET", True, ""): self._file,
            ("files", "GET", True, "content"): self._content,
            ("files", "DELETE", True, ""): lambda asked: self._ask("remove_file", asked.tenant, asked.name),
            ("batches", "POST", False, ""): self._create,
            ("batches", "GET", False, ""): self._list_batches,
            ("batches", "GET", True, ""): self._batch,
            ("batches", "POST", True, "cancel"): self._cancel,
        }
        return routes.get((kind, method, has_name, rest))

    async def _ask(self, method: str, *arguments: Any) -> Any:
        assert self._keeper is not None
        return await self._keeper.ask(method, *arguments)

    async def _upload(self, asked: Asked) -> Any:
        try:
            async with Request(asked.scope, in_pieces(asked.receive)).form(max_files=1, max_fields=16) as form:
                file, purpose = form.get("file"), form.get("purpose")
                if purpose != PURPOSE:
                    raise BatchError(400, f"purpose: must be {PURPOSE!r}.", "purpose", "invalid_value")
                if file is None or isinstance(file, str):
                    raise BatchError(400, "file: must be a file.", "file", "invalid_value")
                expiry = read_expiry(of_form(form, EXPIRY), EXPIRY)
                content, filename = await file.read(), encodable(file.filename or "file")[:LONGEST_NAME]
        except (MultiPartException, UnicodeError) as error:
            raise BatchError(400, f"The body is no form with a file: {error}", None, "invalid_value") from None
        told = (expiry,) if expiry else ()  # which a keeper of another version may not know
        return await self._ask("add_file", asked.tenant, filename, content, *told)

    async def _list_files(self, asked: Asked) -> Any:
        page = read_page(asked.query, MOST_FILES)
        return await self._ask("list_files", asked.tenant, asked.query.get("purpose", ""), page)

    async def _list_batches(self, asked: Asked) -> Any:
        return await self._ask("list_batches", asked.tenant, read_page(asked.query, MOST_LISTED))

    async def _file(self, asked: Asked) -> Any:
        return (await self._ask("file", asked.tenant, asked.name)).shown()

    async def _content(self, asked: Asked) -> Any:
        file = await self._ask("file", asked.tenant, asked.name)

        async def read(begin: int) -> bytes:
            return bytes(await self._ask("content", asked.tenant, asked.name, begin, PIECE))

        return Content(file.size, await read(0), read)

    async def _create(self, asked: Asked) -> Any:
        try:
            wanted = msgspec.json.decode(await read_body(asked.receive) or b"", type=dict)
        except (msgspec.MsgspecError, RecursionError, UnicodeError):
            raise BatchError(400, "The body is no JSON object.", None, "invalid_value") from None
        return await self._ask("create", asked.tenant, wanted)

    async def _batch(self, asked: Asked) -> Any:
        return (await self._ask("batch", asked.tenant, asked.name)).shown()

    async def _cancel(self, asked: Asked) -> Any:
        return await self._ask("cancel", asked.tenant, asked.name)


def as_told(error: BatchError) -> ApiError:
    """The error as clients read it."""
    kind = "invalid_request_error" if error.status < 500 else "service_unavailable_error"
    kind = "rate_limit_error" if error.status == HTTPStatus.TOO_MANY_REQUESTS else kind
    again_s = error.retry_after_s or (AGAIN_S if error.status == HTTPStatus.SERVICE_UNAVAILABLE else 0)
    headers = {"retry-after": str(again_s)} if again_s else {}
    return ApiError(error.status, error.message, kind, error.param, error.code, headers)


async def _send(send: Send, told: Any) -> None:
    if not isinstance(told, Content):
        await send_json(send, 200, told)
        return
    headers = [(b"content-type", b"application/jsonl"), (b"content-length", str(told.size).encode())]
    begin, piece = 0, told.first
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    while True:
        begin += len(piece)
        has_more = bool(piece) and begin < told.size
        await send({"type": "http.response.body", "body": piece, "more_body": has_more})
        if not has_more:
            return
        piece = await told.read(begin)


def in_pieces(receive: Receive) -> Receive:
    """A ``receive`` that gives a long body in pieces, between which the loop turns to others, and holds none after the
    last."""
    part: Message | None = None
    begin = 0

    async def piece() -> Message:
        nonlocal part, begin
        await asyncio.sleep(0)
        message = part = part or await receive()
        if message["type"] != "http.request":
            return message
        body, end = message.get("body", b""), begin + CUT
        has_more, cut = end < len(body), body[begin:end]
        part, begin = (message, end) if has_more else (None, 0)
        return {**message, "body": cut, "more_body": has_more or message.get("more_body", False)}

    return piece


def _below(path: str, root: str) -> bool:
    return path == root or path.startswith(f"{root}/")


async def _gone() -> Message:
    return {"type": "http.disconnect"}
