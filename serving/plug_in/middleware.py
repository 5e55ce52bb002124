"""ASGI middleware for ``vllm serve --middleware``: objectives in headers and bodies reach the plug-in's scheduler.

Without it, a client states its objective in ``vllm_xargs``. With it, the headers and body keys of a whole fleet do as
well, and a mistake gets a 400 with the field's name. Knows vLLM's server only by ``app.state.vllm_config``.
"""

import os
from typing import Any

import msgspec

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
from serving.ingress.errors import bad_request
from serving.plug_in.objectives import FIELD, carried
from serving.plug_in.settings import read_settings
from serving.request.slo import SloError, TierIndex, strip_body

GENERATING = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/invocations"})


class ObjectiveMiddleware:
    """Moves each request's objective into ``vllm_xargs``, the part of a body that vLLM hands on to its scheduler."""

    def __init__(self, app: App) -> None:
        self.app = app
        self._tiers: TierIndex | None = None

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        path = scope["path"].removeprefix(scope.get("root_path", "")) if scope["type"] == "http" else ""
        if path not in GENERATING or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        try:
            body = await read_body(receive) or b""
            body = self._with_objective(scope, body)
        except SloError as error:
            await send_error(send, bad_request(str(error), error.field), path)
            return
        except ClientGone:
            return
        await self.app(with_length(scope, len(body)), replayed(body, receive), send)

    def _with_objective(self, scope: Message, body: bytes) -> bytes:
        """The body with its objective in ``vllm_xargs``; what is no JSON object is left for vLLM to refuse."""
        try:
            document = msgspec.json.decode(body)
        except (msgspec.MsgspecError, RecursionError, UnicodeError):
            return body
        if not isinstance(document, dict):
            return body
        xargs = carried(headers_of(scope), document, self._index(scope))
        changed = strip_body(document) | ({FIELD: xargs} if xargs else {})
        return body if changed == document else msgspec.json.encode(changed)

    def _index(self, scope: Message) -> TierIndex:
        """The tiers that the engine was given, too."""
        if self._tiers is None:
            config: Any = getattr(scope["app"].state, "vllm_config", None)
            self._tiers = read_settings(getattr(config, "additional_config", None), os.environ).to_index()
        return self._tiers
