"""The outermost ASGI layer, but for answers to browsers: headers, API keys, size and speed of bodies, requests at a
time. Notes arrivals.

It wraps Serve's own handler where Serve runs an ingress's HTTP server (``middlewares``), so that bodies on their way
and unreadable headers take none of Serve's places; without that, the ingress wraps itself with it.
"""

import asyncio
import os
import time
from typing import Any

from serving.config.limits import GuardConfig
from serving.ingress import turned_away
from serving.ingress.asgi import App, ClientGone, Message, Receive, Send, read_body, replayed, send_error
from serving.ingress.errors import overloaded
from serving.ingress.limits import (
    Places,
    Refusal,
    check_headers,
    client_of,
    most_bytes,
    takes_file,
    too_large,
    too_slow,
)
from serving.request.tenant import GUARDED, SENT_FOR, tenant_by, tenant_of

ARRIVED = "polyslo.arrived_s"  # key of an ASGI scope: when the request was seen, by this process's monotonic clock
SETTINGS = "POLYSLO_GUARD"  # environment variable: the settings of a process's guard, as JSON
ENVIRONMENT_KEY = "VLLM_API_KEY"
OPEN_FILES, FILE_TIMES = 2, 10.0  # files on their way at a time, and how much longer than other bodies they may take
WITH_BODY = frozenset({"POST", "PUT", "PATCH"})


class Guard:
    """Lets requests through that keep to the limits, with their body already read."""

    def __init__(self, app: App, config: GuardConfig) -> None:
        self.app, self.config, self._tenants = app, config, tenants_of(config)
        self._places = Places(config.most_requests, config.requests_per_client)
        self._bodies = OpenBodies(config.open_bodies, config.body_s)
        self._files = OpenBodies(OPEN_FILES, FILE_TIMES * config.body_s, config.body_s)
        self._root = ""  # the application's route prefix, which Serve puts into a scope only behind this guard

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or ARRIVED in scope:  # websockets, and what another guard has let through
            await self.app(scope, receive, send)
            return
        scope[ARRIVED], root = time.monotonic(), scope.get("root_path", "")
        path = scope["path"].removeprefix(self._root or root)
        try:
            check_headers(scope["headers"], self.config)
            if scope["method"] in WITH_BODY:
                await self._with_body(path, scope, receive, send)
            else:
                await self.app(scope, receive, send)
        except Refusal as refusal:
            turned_away.note(refusal.error.code)
            await send_error(send, refusal.error, path)
        except ClientGone:
            return
        finally:
            if scope.get("root_path", "") != root:  # a proxy's health check comes before any client
                self._root = scope["root_path"]

    async def _with_body(self, path: str, scope: Message, receive: Receive, send: Send) -> None:
        client = client_of(scope["headers"], self.config.client_header)
        bodies = self._files if takes_file(path) else self._bodies
        again = replayed(b"", receive)  # of a client without a key, whom the application refuses
        if self._is_known(path, scope):
            most = most_bytes(path, self.config)
            again = replayed(await bodies.read(receive, most, dict(scope["headers"])), receive)
        self._places.take(client)
        try:
            await self.app(scope, again, send)
        finally:
            self._places.give_back(client)

    def _is_known(self, path: str, scope: Message) -> bool:
        """Whether a request has a key of any of the models, or needs none. Which of them it opens is theirs to say."""
        if self._tenants is None or SENT_FOR in scope:
            return True
        headers = ((name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"])
        return not path.startswith(GUARDED) or tenant_of(path, headers) in self._tenants


def tenants_of(config: GuardConfig) -> frozenset[str] | None:
    """Who may ask any of the models; None: anybody. vLLM takes the environment's key where none is configured."""
    if not config.asks_environment:
        return frozenset(config.tenants)
    key = os.environ.get(ENVIRONMENT_KEY)
    return frozenset((*config.tenants, tenant_by(key))) if key else None


class OpenBodies:
    """Bodies on their way. Where there are too many, the one that takes longest is given up for the newest, once it has
    had ``fair_s``; before that, the newest is refused."""

    def __init__(self, most: int, limit_s: float, fair_s: float = 0.0) -> None:
        self._most, self._limit_s, self._fair_s = most, limit_s, fair_s
        self._open: dict[asyncio.Timeout, float] = {}  # oldest first, with the loop's time at which they began

    async def read(self, receive: Receive, most_bytes: int, headers: dict[bytes, bytes]) -> bytes:
        """The whole body; raises ``Refusal`` (408, 413) and ``ClientGone``."""
        too_long = too_large(413, f"The body has more than {most_bytes} bytes.")
        if _stated_bytes(headers) > most_bytes:
            raise Refusal(too_long)
        try:
            async with asyncio.timeout(self._limit_s) as limit:
                self._open[limit] = asyncio.get_running_loop().time()
                self._bound()
                body = await read_body(receive, most_bytes)
        except TimeoutError:
            if limit not in self._open:
                raise Refusal(too_slow("The body was given up for a newer one: too many are on their way.")) from None
            raise Refusal(too_slow(f"The body did not arrive within {self._limit_s:g} s.")) from None
        finally:
            self._open.pop(limit, None)
        if body is None:
            raise Refusal(too_long)
        return body

    def _bound(self) -> None:
        if len(self._open) > self._most:
            oldest, now_s = next(iter(self._open)), asyncio.get_running_loop().time()
            if now_s - self._open[oldest] < self._fair_s:
                raise Refusal(overloaded(503, turned_away.QUEUE_FULL, "Too many files are on their way."))
            del self._open[oldest]
            oldest.reschedule(now_s)


def _stated_bytes(headers: dict[bytes, bytes]) -> int:
    """The content length, 0 where none is stated; digits beyond any size count as too many."""
    digits = headers.get(b"content-length", b"0")
    return int(digits[:18]) if digits.isdigit() else 0


def middlewares() -> list[Any]:
    """For Serve's ``RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH``: the guard, where the process has settings for one, and
    around it what lets pages of other origins read refusals."""
    from starlette.middleware import Middleware

    from serving.ingress.browsers import ForBrowsers

    settings = os.environ.get(SETTINGS)
    if not settings:
        return []
    config = GuardConfig.model_validate_json(settings)
    browsers = [Middleware(ForBrowsers, cors=config.cors)] if config.cors else []
    return [Middleware(Guard, config=config), *browsers]
