"""Streams that clients may take up again at any ingress: numbers their events, and finds what is kept of them.

A client asks for ids with ``x-stream-resume: 1``. To go on, it sends the same request with ``last-event-id``.
"""

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any, Protocol

import msgspec

from protocol.kept_streams import KeptStream
from serving.ingress.annotate import StreamAnnotator
from serving.ingress.errors import ApiError, is_anthropic, not_resumed, not_resumed_now
from serving.ingress.limits import RawHeaders, Refusal
from serving.request.slo import SloError
from serving.request.state import HttpRequestState
from serving.request.trail import (
    LAST_EVENT_ID,
    NAME_BYTES,
    Position,
    StreamTrail,
    can_be_made_again,
    is_continuation,
    read_position,
    resume_key,
)

RESUMABLE = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/messages"})
RESUME = b"x-stream-resume"
ON, OFF = ("1", "true"), ("0", "false")
TAKE_S = 10.0  # that a replica may take to say what it keeps: an ingress that is new finds it first
KNOWN_S, POLL_S = 10.0, 0.05  # of an ingress, in which a replica may be unknown, and between two looks
GONE, DIVERGED = "stream_gone", "stream_diverged"

logger = logging.getLogger("polyslo.ingress")

Take = Callable[[str, str], Awaitable[KeptStream | None]]


async def _take_nothing(_replica: str, _key: str) -> KeptStream | None:
    return None


class Resumption:
    """``take`` asks one of the ``known`` replicas for a stream; ``count`` is told how each attempt to go on went."""

    def __init__(
        self,
        take: Take = _take_nothing,
        known: Callable[[], Collection[str]] = tuple,
        count: Callable[[str], None] = lambda _how: None,
    ) -> None:
        self._take, self._known, self._count = take, known, count
        self._born_s = time.monotonic()

    async def prepare(
        self, request_state: HttpRequestState, path: str, headers: RawHeaders, document: Mapping[str, Any]
    ) -> None:
        """Give a request a trail, where its client may take up its stream or does so.

        Raises:
            SloError: one of the two headers is malformed, or the request makes no such stream.
            Refusal: the rest of the stream cannot be had, or its replica does not answer now.
        """
        asked, last_id = _read(headers)
        if not asked and last_id is None:
            return
        is_possible = path in RESUMABLE and makes_one_stream(document, request_state.expected)
        if last_id is not None and not is_possible:
            raise SloError(LAST_EVENT_ID, "only a stream of one sequence without logprobs can be resumed")
        if is_possible:
            position = None if last_id is None else read_position(last_id)
            name = secrets.token_hex(NAME_BYTES) if position is None else position.name
            key = resume_key(name, request_state.tenant, path, document)
            request_state.trail = StreamTrail(name, key, position)
            if position is not None:
                await self._find(request_state, request_state.trail, position, can_be_made_again(document))

    async def _find(
        self, request_state: HttpRequestState, trail: StreamTrail, position: Position, is_repeatable: bool
    ) -> None:
        """The tokens of a stream so far; it goes on as the request that it was, with its age."""
        try:
            kept = await self._taken(position.replica, trail.key)
        except Exception as error:
            logger.warning("replica %s does not say what it keeps of a stream: %r", position.replica, error)
            if not is_repeatable:
                self._count("unanswered")
                raise Refusal(not_resumed_now()) from error
            kept = None
        if kept is not None and is_continuation(kept, position):
            trail.kept, trail.asked_s = kept, request_state.arrived_s
            request_state.arrived_s = time.monotonic() - kept.age_s
            if request_state.slo.ttft_slowdown:
                request_state.slo = msgspec.structs.replace(request_state.slo, ttft_s=kept.ttft_s, ttft_slowdown=0.0)
        elif not is_repeatable:
            self._count("gone")
            raise Refusal(not_resumed(GONE, "its tokens are not kept any more, and sampling would make others."))

    async def _taken(self, replica: str, key: str) -> KeptStream | None:
        """What the replica keeps; raises what came in place of an answer."""
        if not await self._is_known(replica):
            return None
        return await asyncio.wait_for(self._take(replica, key), TAKE_S)

    async def _is_known(self, replica: str) -> bool:
        """Whether a replica lives; an ingress that has just started hears of its replicas first."""
        give_up_s = self._born_s + KNOWN_S
        while replica not in self._known():
            if time.monotonic() > give_up_s:
                return False
            await asyncio.sleep(POLL_S)
        return True

    def done(self, request_state: HttpRequestState) -> None:
        """The response of a request has ended."""
        trail = request_state.trail
        if trail is not None and trail.how:
            self._count("diverged" if trail.is_diverged else trail.how)


def _read(headers: RawHeaders) -> tuple[bool, str | None]:
    """Whether ids are asked for, and the id that was got last."""
    asked, last_id = False, None
    for name, value in headers:
        if name == RESUME:
            word = value.decode("latin-1").strip().lower()
            if word not in ON + OFF:
                raise SloError(RESUME.decode(), "must be 1 or 0")
            asked = word in ON
        elif name == LAST_EVENT_ID.encode():
            last_id = value.decode("latin-1").strip()
    return asked, last_id


def makes_one_stream(document: Mapping[str, Any], expected: int) -> bool:
    """Whether a request makes events that tokens alone give again."""
    asked = (document.get("logprobs"), document.get("prompt_logprobs"))
    has_logprobs = any(value is not None and value is not False for value in asked)  # 0 asks for some
    return document.get("stream") is True and expected == 1 and not has_logprobs


class Events(Protocol):
    """The events of one stream, on their way to the client."""

    def feed(self, data: bytes, last: bool) -> bytes: ...


def events_of(request_state: HttpRequestState, path: str) -> Events:
    """With ids, where the client has asked for them."""
    annotator = StreamAnnotator(request_state)
    return annotator if request_state.trail is None else NumberedEvents(annotator, request_state.trail, path)


def resume_header(request_state: HttpRequestState) -> list[tuple[bytes, bytes]]:
    """What tells a client that it may take up the stream."""
    return [] if request_state.trail is None else [(RESUME, b"1")]


class NumberedEvents:
    """Gives each event its id, and leaves out those that the client has."""

    def __init__(self, annotator: StreamAnnotator, trail: StreamTrail, path: str) -> None:
        self._annotator, self._trail, self._path = annotator, trail, path
        self._is_over = False  # the client was told why nothing follows

    def feed(self, data: bytes, last: bool) -> bytes:
        """As of ``StreamAnnotator``."""
        events = self._annotator.feed(data, last).split(b"\n\n")
        return b"".join(self._numbered(event) for event in events if event)

    def _numbered(self, event: bytes) -> bytes:
        if self._trail.is_diverged:
            return self._last_words(event)
        if event.startswith((b'data: {"error"', b"event: error")):
            return event + b"\n\n"  # without an id: the client may go on from its last one
        name = self._trail.event_id()
        return b"" if name is None else b"id: " + name.encode() + b"\n" + event + b"\n\n"

    def _last_words(self, event: bytes) -> bytes:
        """A stream that has become another one ends with the reason."""
        if event == b"data: [DONE]":
            return event + b"\n\n"
        if self._is_over:
            return b""
        self._is_over = True
        return error_event(not_resumed(DIVERGED, "computed again, it became another one."), self._path)


def error_event(error: ApiError, path: str) -> bytes:
    """An error as an event of a stream."""
    head = b"event: error\n" if is_anthropic(path) else b""
    return head + b"data: " + json.dumps(error.body_for(path)).encode() + b"\n\n"
