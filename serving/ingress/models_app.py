"""Several models behind one endpoint: the ASGI application in front of those of the models, which knows no vLLM.

A request goes to the model that its body names, or whose adapter it names. What concerns all of them is answered here
from what each says: the list of models, health, status and metrics.
"""

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import Sequence
from functools import partial
from http import HTTPStatus
from typing import Any

import msgspec

from serving.config.app import AppConfig
from serving.config.model_tables import tables_of
from serving.config.models import models_by_name
from serving.ingress.asgi import (
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
from serving.ingress.dashboard_page import DASHBOARD, send_dashboard
from serving.ingress.guard import Guard
from serving.ingress.ingress import IngressApp, within_prefix
from serving.ingress.mended_errors import resized
from serving.ingress.middleware import UNKNOWN_MODEL
from serving.ingress.models_metrics import metrics_app
from serving.ingress.replica_status import of_several

ALIASES = "Valid aliases: %s."  # vLLM's words in its 404
MODELS, STORED = "/v1/models", "/v1/responses/"


class _Named(msgspec.Struct):
    """The one field of a body that is read here; another type of it is vLLM's to refuse."""

    model: Any = None


_named = msgspec.json.Decoder(_Named)


class ModelsApp:
    """The models' applications in the order of the configuration; the first serves what names no model."""

    def __init__(self, config: AppConfig, apps: Sequence[IngressApp]) -> None:
        """``apps``: one for each entry of ``config.models``."""
        self.config, self.apps = config, tuple(apps)
        self._by_name = {name: self.apps[place] for name, place in models_by_name(config.models).items()}
        self._metrics_app = metrics_app([app.metrics for app in self.apps])
        self._chosen = Guard(self._choose, config.guard)
        for app in self.apps[1:]:  # a program may ask several models: its age and its responses are known to all
            app.middleware.programs = self.apps[0].middleware.programs

    def set_table(self, settings: Any) -> None:
        """Take ``user_config``: each model takes the tiers that are its own, or says why not."""
        for app in self.apps:
            app.apply_table(partial(self._table_of, settings, app.config.entry))

    def _table_of(self, settings: Any, model: str) -> Any:
        return tables_of(settings, self.config)[model]

    async def forward_table(self) -> None:
        """As of each model."""
        await asyncio.gather(*(app.forward_table() for app in self.apps))

    def check(self) -> None:
        """Raise ``RuntimeError`` where this ingress cannot serve one of its models any more."""
        for app in self.apps:
            app.check()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        scope = within_prefix(scope)
        reads = scope["type"] == "http" and scope["method"] in ("GET", "HEAD")
        if scope["type"] != "http":
            await self.apps[0](scope, receive, send)
        elif reads and scope["path"] == "/health":
            await self._tell_health(send)
        elif reads and scope["path"] == "/polyslo/status":
            await send_json(send, 200, of_several(await asyncio.gather(*(app.status() for app in self.apps))))
        elif reads and scope["path"] in ("/metrics", "/metrics/"):
            await self._metrics_app(scope, receive, send)
        elif reads and scope["path"] == DASHBOARD:
            await send_dashboard(send)
        else:
            await self._chosen(scope, receive, send)

    async def _tell_health(self, send: Send) -> None:
        """Healthy is an ingress that hears a replica of every model, but for those that may have none."""
        for app, trouble in zip(self.apps, await asyncio.gather(*(app.trouble() for app in self.apps)), strict=True):
            if trouble is not None:
                told = f"Model {app.config.model.name!r}: {trouble.message}"
                await send_error(send, dataclasses.replace(trouble, message=told))
                return
        await send_json(send, 200, {"status": "ok"})

    async def _choose(self, scope: Message, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientGone):
            await self._pass_on(scope, receive, send)

    async def _pass_on(self, scope: Message, receive: Receive, send: Send) -> None:
        """To whom a request is for; its body is read once and given again. Raises ``ClientGone``."""
        body = await read_body(receive) if scope["method"] == "POST" else None
        if scope["method"] == "GET" and scope["path"] == MODELS:
            await self._list(scope, receive, send)
        elif scope["path"].startswith(STORED):
            await self._ask_in_turn(scope, body, receive, send)
        else:
            name = model_of(body)
            if name and name not in self._by_name:
                await self._refuse({**scope, UNKNOWN_MODEL: True}, body, receive, send)
            else:
                await self._by_name.get(name, self.apps[0])(scope, given(body, receive), send)

    async def _refuse(self, scope: Message, body: bytes | None, receive: Receive, send: Send) -> None:
        """What vLLM says of a model that it does not know, with the names of all that the client has a key of."""
        answers = [(app.config.model.name, await answer_of(app, scope, given(body, receive))) for app in self.apps]
        told = [each for each in answers if each[1].status != HTTPStatus.UNAUTHORIZED] or answers
        names, answer = [name for name, _ in told], told[0][1]
        own, known = (ALIASES % json.dumps(", ".join(each), ensure_ascii=False)[1:-1] for each in (names[:1], names))
        mended = answer.body.replace(own.encode(), known.encode())
        await send(resized(answer.start, len(mended)))
        await send({"type": "http.response.body", "body": mended, "more_body": False})

    async def _list(self, scope: Message, receive: Receive, send: Send) -> None:
        """The models of all servers that answer; where none does, what the first says (that it wants a key)."""
        answers = [await answer_of(app, scope, receive) for app in self.apps]
        good = [answer for answer in answers if answer.status == 200]
        start, body = (good or answers)[0]
        if listed := [msgspec.json.decode(answer.body) for answer in good]:
            body = msgspec.json.encode({**listed[0], "data": [card for each in listed for card in each["data"]]})
        await send(resized(start, len(body)))
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _ask_in_turn(self, scope: Message, body: bytes | None, receive: Receive, send: Send) -> None:
        """A stored response is with one of the servers: the others answer 404, or that the key is none of theirs."""
        attempts = list[Attempt]()
        for app in self.apps:
            attempts.append(attempt := Attempt(send))
            await app(dict(scope), given(body, receive), attempt)
            if not attempt.held:
                return
        for message in min(attempts, key=lambda each: each.is_unauthorized).held:
            await send(message)


def model_of(body: bytes | None) -> str:
    """The model that a body names; empty where it names none, or is no JSON object, which vLLM then says itself."""
    try:
        named = _named.decode(body or b"").model
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return ""
    return named if isinstance(named, str) else ""


def given(body: bytes | None, receive: Receive) -> Receive:
    """The ``receive`` of a request whose body was read already; None: it was not."""
    return receive if body is None else replayed(body, receive)


class Attempt:
    """The ``send`` of a request that another may answer: a 404 is held back, and so is that a key is wrong."""

    def __init__(self, send: Send) -> None:
        self.send, self.held = send, list[Message]()

    @property
    def is_unauthorized(self) -> bool:
        """Whether what is held back says that a key is wrong."""
        return bool(self.held[0]["status"] == HTTPStatus.UNAUTHORIZED)

    async def __call__(self, message: Message) -> None:
        is_start = message["type"] == "http.response.start"
        if self.held or (is_start and message["status"] in (HTTPStatus.NOT_FOUND, HTTPStatus.UNAUTHORIZED)):
            self.held.append(message)
        else:
            await self.send(message)
