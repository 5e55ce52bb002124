"""ASGI middleware around vLLM's OpenAI server: SLO in, verdict out. Never touches a prompt; Serve echoes request ids.

The response of a generating endpoint is held until its admission decision is known (the responses API announces itself
before): a refusal replaces it with 429 (or 503), a failure before any token with 500; anything else gains
``service_tier`` and the ``slo`` object.
"""

import time
from collections.abc import Callable
from typing import Any

import msgspec

from protocol.programs import INF
from serving.config.limits import LimitsConfig
from serving.ingress.annotate import StreamAnnotator, annotate_json, mend_error, only_error
from serving.ingress.asgi import (
    App,
    ClientGone,
    Message,
    Receive,
    Send,
    headers_of,
    read_body,
    replayed,
    send_error,
    with_length,
)
from serving.ingress.errors import ApiError, bad_request, engine_failed, refused
from serving.ingress.guard import ARRIVED
from serving.ingress.json_body import read_json
from serving.ingress.limits import SCORING, Refusal, check_document, check_scoring
from serving.ingress.mended_errors import MendedErrors, is_json, is_stream, resized
from serving.ingress.resumption import Events, Resumption, events_of, resume_header
from serving.ingress.scoring import score
from serving.ingress.sequences import expected_sequences
from serving.request.program import read_program
from serving.request.program_memory import ProgramMemory
from serving.request.slo import SloError, TierIndex, resolve, strip_body
from serving.request.state import HttpRequestState, current_request_state
from serving.request.tenant import SENT_FOR, current_tenant, tenant_of
from serving.request.traits import read_traits

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
UNKNOWN_MODEL = "polyslo.unknown_model"  # key of an ASGI scope: vLLM's server is only to say that there is none


class SloMiddleware:
    """``tiers()`` gives the tier table in force; ``done(request_state, status)`` is told of every finished response.

    ``has_tenants``: the application checks API keys, so that a key tells who asks.
    """

    def __init__(
        self,
        app: App,
        tiers: Callable[[], TierIndex],
        done: Callable[[HttpRequestState, int], None],
        overload_status: int = 429,
        limits: LimitsConfig | None = None,
        has_tenants: bool = False,
    ) -> None:
        self.app, self.tiers, self.done, self.overload_status = app, tiers, done, overload_status
        self.limits, self.has_tenants = limits or LimitsConfig(), has_tenants
        self.programs = ProgramMemory()
        self.resumption = Resumption()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        token = current_tenant.set(self._tenant(scope))
        try:
            if scope["method"] != "POST":
                await self._mended(scope, receive, send)
            else:
                await self._post(scope, receive, send)
        finally:
            current_tenant.reset(token)

    def _tenant(self, scope: Message) -> str:
        """Who asks; empty where no key is checked."""
        if SENT_FOR in scope or not self.has_tenants:
            return str(scope.get(SENT_FOR, ""))
        headers = ((name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"])
        return tenant_of(scope["path"], headers)

    async def _post(self, scope: Message, receive: Receive, send: Send) -> None:
        path = scope["path"]
        try:
            body = await read_body(receive) or b""
            document = self._read(body)
            if path == SCORING:
                check_scoring(document, self.limits)
                await score(self._mended, scope, replayed(body, receive), send, self.overload_status)
                return
            if path not in GENERATING or UNKNOWN_MODEL in scope:
                await self._mended(scope, replayed(body, receive), send)
                return
            request_state, body = self._open(scope, document, body)
            await self.resumption.prepare(request_state, path, scope["headers"], document)
        except SloError as error:
            await send_error(send, bad_request(str(error), error.field), path)
            return
        except Refusal as refusal:
            await send_error(send, refusal.error, path)
            return
        except ClientGone:
            return
        await self._generate(request_state, with_length(scope, len(body)), replayed(body, receive), send)

    async def _mended(self, scope: Message, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, MendedErrors(send, scope["path"]))

    async def _generate(self, request_state: HttpRequestState, scope: Message, receive: Receive, send: Send) -> None:
        """Have it answered; a stream may be refused after the application has begun it, and nothing was sent yet."""
        response = Response(request_state, send, self.overload_status, scope["path"])
        if (told := request_state.program) is not None:
            request_state.program = self.programs.recall(told, request_state.tenant, request_state.arrived_s)
            self.programs.follow(request_state)
        token = current_request_state.set(request_state)
        try:
            await self.app(scope, receive, response)
        except Refusal as refusal:
            if response.status:
                raise RuntimeError("refused in the middle of its answer") from refusal
            await response.refuse(refusal.error)
        except Exception:  # vLLM's responses API cannot say that an engine failed
            if request_state.finish != "error" or not await response.break_off():
                raise
        finally:
            current_request_state.reset(token)
            self.programs.note(request_state, time.monotonic())
            self.done(request_state, response.status)

    def _read(self, body: bytes) -> dict[str, Any]:
        """The JSON object in ``body``; empty where it is something else, which vLLM then says itself."""
        document = read_json(body, self.limits.json_values, self.limits.json_depth) if body else None
        return document if isinstance(document, dict) else {}

    def _open(self, scope: Message, document: dict[str, Any], body: bytes) -> tuple[HttpRequestState, bytes]:
        """The state of a request, and its body without what only the ingress understands."""
        check_document(document, self.limits)
        headers = headers_of(scope)
        arrived_s = scope.get(ARRIVED, time.monotonic())
        asked, expected = document.get("service_tier"), expected_sequences(document)
        tenant = current_tenant.get()
        program = read_program(headers, document) or self.programs.continued(document, tenant)
        deadlines = (program.deadline_s, self.programs.deadline_s(program, tenant, arrived_s)) if program else ()
        slo = resolve(headers, document, self.tiers(), *deadlines)
        request_state = HttpRequestState(slo, arrived_s, program, str(asked or ""), expected=expected, is_open=True)
        request_state.traits = read_traits(headers, document, program)
        request_state.tenant = tenant
        stripped = strip_body(document)
        return request_state, body if stripped is document else msgspec.json.encode(stripped)


class Response:
    """The ``send`` of one generating request: holds the start, swaps in a refusal, annotates the rest."""

    def __init__(self, request_state: HttpRequestState, send: Send, overload_status: int, path: str) -> None:
        self.request_state, self.send, self.path = request_state, send, path
        self.overload_status, self.status = overload_status, 0
        self._start: Message | None = None
        self._stream: Events | None = None
        self._json: list[bytes] | None = None
        self._replaced = False
        self._held = b""

    async def __call__(self, message: Message) -> None:
        if self._replaced:
            return
        if self._stream is not None and message.get("more_body", False):
            if data := self._stream.feed(bytes(message["body"]), False):
                await self.send({"type": "http.response.body", "body": data, "more_body": True})
        elif message["type"] == "http.response.start":
            self._start = message
        elif message["type"] == "http.response.body":
            await self._body(bytes(message.get("body", b"")), not message.get("more_body", False))
        else:
            await self.send(message)

    async def _body(self, data: bytes, last: bool) -> None:
        if not self.request_state.decisions and not last:
            self._held += data
            return
        data, self._held = self._held + data, b""
        if not self.request_state.decisions:
            data = self._undecided(data)
        if self._start is not None and self.status == 0 and await self._begin():
            return
        if self._stream is not None:
            data = self._stream.feed(data, last)
        elif self._json is not None:
            self._json.append(data)
            if not last:
                return
            data = self._finished(b"".join(self._json))
            await self._send_start(len(data))
        await self.send({"type": "http.response.body", "body": data, "more_body": not last})

    def _undecided(self, data: bytes) -> bytes:
        """All of a response about which nothing was decided; an error in place of a stream gets its own status."""
        if self._start is not None and self.status == 0 and is_stream(self._start) and (found := only_error(data)):
            status, data = found
            self._start = {**self._start, "status": status, "headers": [(b"content-type", b"application/json")]}
        return data

    def _finished(self, data: bytes) -> bytes:
        """A whole JSON answer; an error carries no verdict."""
        is_error = self.status >= 400
        return mend_error(data, self.status, self.path) if is_error else annotate_json(data, self.request_state)

    async def _begin(self) -> bool:
        """At the first body chunk; whether a refusal took the response's place."""
        assert self._start is not None
        if (error := self._error_instead()) is not None:
            await self.refuse(error)
            return True
        self.status = int(self._start["status"])
        if is_stream(self._start):
            self._stream = events_of(self.request_state, self.path)
            await self._send_start(None)
        elif is_json(self._start):
            self._json = []
        else:
            await self._send_start(None)
        return False

    def _error_instead(self) -> ApiError | None:
        """What takes the place of a response that vLLM's server begins although there is nothing to answer."""
        request_state = self.request_state
        if (refusal := request_state.refusal) is not None:
            return refused(refusal, self.overload_status)
        if request_state.is_started:
            return None
        if request_state.mistake is not None and self._start is not None and is_stream(self._start):
            return bad_request(*request_state.mistake)
        return engine_failed() if request_state.finish == "error" else None

    async def refuse(self, error: ApiError) -> None:
        """Answer with an error in place of the response, of which nothing has been sent."""
        self._replaced, self.status = True, error.status
        await send_error(self.send, error, self.path)

    async def break_off(self) -> bool:
        """End a response that will not go on with an error of its own, or of its stream; whether that could be."""
        if self.status == 0:
            await self.refuse(engine_failed())
        elif isinstance(self._stream, StreamAnnotator):
            data = self._stream.failure(engine_failed("The request failed."))
            await self.send({"type": "http.response.body", "body": data, "more_body": False})
        else:
            return False
        return True

    async def _send_start(self, length: int | None) -> None:
        assert self._start is not None
        start = self._start if length is None else resized(self._start, length)
        if self.status < 400:
            tier = (b"x-slo-tier", self.request_state.tier.encode("latin-1", "replace"))
            promised = (b"x-slo-promised", b"true" if self.request_state.is_promised else b"false")
            more = [tier, promised, *self._stage_header(), *resume_header(self.request_state)]
            start = {**start, "headers": [*start.get("headers", []), *more]}
        await self.send(start)

    def _stage_header(self) -> list[tuple[bytes, bytes]]:
        """When a part of a program with a deadline is due, from its arrival."""
        stage = self.request_state.stage
        if stage is None or stage.e2e_s == INF:
            return []
        return [(b"x-slo-stage-deadline-ms", f"{1000.0 * stage.e2e_s:.0f}".encode())]
