"""The ASGI application of one ingress: vLLM's server behind the SLO middleware, with health and status beside it."""

import asyncio
import contextvars
import logging
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from controller.deploys import ApplicationClash
from protocol.garbage import Garbage
from serving.config.app import AppConfig
from serving.config.base import ConfigError
from serving.config.live import in_force
from serving.config.model_tables import tables_of
from serving.config.tiers import TierTableConfig
from serving.dispatch.dispatcher import Dispatcher
from serving.dispatch.transport import RayTransport
from serving.ingress.asgi import App, Message, Receive, Send, send_error, send_json
from serving.ingress.browsers import for_browsers
from serving.ingress.dashboard_page import DASHBOARD, send_dashboard
from serving.ingress.disconnects import Disconnects
from serving.ingress.errors import ApiError, unavailable
from serving.ingress.guard import Guard
from serving.ingress.metrics import IngressMetrics
from serving.ingress.middleware import SloMiddleware
from serving.ingress.other_tasks import refusal_of
from serving.ingress.replica_status import with_stale
from serving.ingress.resumption import Resumption
from serving.request.slo import TierIndex
from serving.request.state import HttpRequestState

logger = logging.getLogger("polyslo.ingress")

PING_S = 1.0
CONFIGURE_TRIES, CONFIGURE_S = 5, 30.0
PATIENCE_S = 5.0  # with the controller, once it has been up
STATUS_AGE_S = 0.5  # health and status answers may be so old


class Deploy(NamedTuple):
    """Which deploy of which application an ingress belongs to."""

    application: str = ""  # Serve's name, under which the fleet is scaled
    id: str = ""


NO_DEPLOY = Deploy()


class IngressApp:
    """Holds the tier table in force, pings the controller with it, and answers what is not vLLM's to answer."""

    def __init__(
        self,
        config: AppConfig,
        transport: RayTransport,
        server: Any,
        dispatcher: Dispatcher,
        deploy: Deploy = NO_DEPLOY,
        engine_failed: Callable[[], bool] = lambda: False,
    ) -> None:
        """``engine_failed``: whether vLLM's own client of the engine has ended: no request gets an answer then."""
        self.config, self.transport, self.dispatcher = config, transport, dispatcher
        self.metrics = IngressMetrics(config.model.name)
        self._metrics_app = self.metrics.to_app()
        self.table: TierTableConfig | None = None
        self.table_error = ""
        self._index: TierIndex | None = None
        self._deploy = deploy
        self._tell(config)
        self._status: dict[str, Any] = {"replicas": []}
        self._status_s = float("-inf")
        self._asking: asyncio.Task[None] | None = None
        self._engine_failed, self._garbage = engine_failed, Garbage()
        limits = config.ingress.limits
        has_tenants = bool(getattr(getattr(server, "state", None), "checks_keys", False))
        status = config.fleet.overload_status
        self.middleware = SloMiddleware(Disconnects(server), self.index, self.done, status, limits, has_tenants)
        self.middleware.resumption = Resumption(transport.take_stream, self._known, self.metrics.streams_resumed)
        self._generate = Guard(self.middleware, config.guard)
        self._cors = getattr(getattr(server, "state", None), "cors", None)
        self.has_tenants, self._answered = has_tenants, self.for_browsers(self._choose)
        self._pinging = asyncio.get_running_loop().create_task(self._ping())

    def for_browsers(self, app: App) -> App:
        """``app`` with answers to browsers of other sites, as vLLM's arguments allow them."""
        return for_browsers(app, self._cors)

    def set_table(self, settings: Any) -> None:
        """Take the tier table that ``user_config`` is."""
        self.apply_table(lambda: tables_of(settings, self.config)[self.config.entry])

    def apply_table(self, read: Callable[[], TierTableConfig]) -> None:
        """Take what ``read`` gives; one that is not newer, or not sound, is refused with its reason in the status."""
        try:
            table = read()
            config = in_force(self.config, table.fleet)
            if self.table is not None and table != self.table and table.version <= self.table.version:
                raise ConfigError(f"version: the table changed, so raise it above {self.table.version}")
        except ConfigError as error:
            self.table_error = str(error)
            if self.table is None:
                raise
            logger.error("tier table not applied: %s", error)
            return
        self.table, self._index, self.table_error = table, table.to_index(), ""
        self._tell(config)

    def _tell(self, config: AppConfig) -> None:
        """Go by this configuration, and have every ping tell the controller of it, in so many shards."""
        self._may_be_empty = config.fleet.autoscaling.may_be_empty
        self._options = msgspec.msgpack.encode(config.fleet_options(*self._deploy))
        self._shards = config.fleet.controller_shards

    def index(self) -> TierIndex:
        """What requests are resolved with."""
        if self._index is None:
            raise RuntimeError("no tier table: set user_config of the ingress deployment")
        return self._index

    def done(self, request_state: HttpRequestState, status: int) -> None:
        self.dispatcher.close_request(request_state)
        self.metrics.observe(request_state)
        self.middleware.resumption.done(request_state)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        await self._answered(scope, receive, send)

    async def _choose(self, scope: Message, receive: Receive, send: Send) -> None:
        scope = within_prefix(scope)
        reads = scope["type"] == "http" and scope["method"] in ("GET", "HEAD")
        if reads and scope["path"] in ("/health", "/polyslo/status"):
            await self._answer(scope["path"], send)
        elif reads and scope["path"] in ("/metrics", "/metrics/"):
            await self._metrics_app(scope, receive, send)
        elif reads and scope["path"] == DASHBOARD:
            await send_dashboard(send)
        elif scope["type"] == "http" and (refusal := refusal_of(scope["path"])):
            await send_error(send, refusal)
        else:
            await self._generate(scope, receive, send)

    # -- health and status ------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise ``RuntimeError`` where this ingress can serve nothing any more, so that Serve makes a new one."""
        if self._engine_failed():
            raise RuntimeError("vLLM's output handler has ended")
        if self._pinging.done():
            raise RuntimeError("the task that configures the controller has ended")
        self.dispatcher.check()

    async def _answer(self, path: str, send: Send) -> None:
        if path == "/health" and (trouble := await self.trouble()):
            await send_error(send, trouble)
        else:
            await send_json(send, 200, {"status": "ok"} if path == "/health" else await self.status())

    async def trouble(self) -> ApiError | None:
        """Why no request can be served, if that is so; a fleet that may be empty starts a replica for a request."""
        try:
            self.check()
        except RuntimeError as error:
            return unavailable(f"This ingress has failed: {error}.", "ingress_failed")
        if self._may_be_empty or self._heard():  # whom it hears it can serve by, whatever the controller does
            return None
        if any(replica["live"] for replica in (await self.status())["replicas"]):
            return None
        return unavailable("No replica is alive.")

    async def status(self) -> dict[str, Any]:
        """The controller's status, asked for at most twice a second; without it, replicas as they were last known."""
        if time.monotonic() - self._status_s > STATUS_AGE_S:
            if self._asking is None or self._asking.done():  # a context of its own: it outlives the request that asks
                asking = self._ask_status()
                self._asking = asyncio.get_running_loop().create_task(asking, context=contextvars.Context())
            await asyncio.shield(self._asking)
        told = {"model": self.config.model.name, "default_tier": self.table.default_tier if self.table else None}
        return self._status | told | ({"tier_table_error": self.table_error} if self.table_error else {})

    async def _ask_status(self) -> None:
        try:
            status = await asyncio.wait_for(self.transport.status(), 2.0)
            heard = self._heard()
            last = [replica for replica in self._status["replicas"] if replica["replica"] in heard]
            self._status = status | {"replicas": with_stale(status["replicas"], last, heard)}
        except Exception as error:
            known = with_stale([], self._status["replicas"], self._heard())
            self._status |= {"replicas": known, "error": f"controller unreachable: {error!r}"[:300]}
        self._status_s = time.monotonic()  # also where nothing was told: who asks meanwhile waits for that no longer

    def _heard(self) -> set[str]:
        """Replicas that speak to this ingress, whether or not the controller knows of them."""
        return self.transport.heard(self.config.fleet.stall_timeout_s)

    def _known(self) -> set[str]:
        """Replicas that this ingress has heard from or of."""
        return self._heard() | {replica["replica"] for replica in self._status["replicas"]}

    async def forward_table(self) -> None:
        """Wait until the controller is up and has the tier table, so that no request is served without it.

        Raises:
            ApplicationClash: another application has this controller.
        """
        for attempt in range(CONFIGURE_TRIES):
            try:
                await self._configure(CONFIGURE_S)
                break
            except ApplicationClash:
                raise
            except Exception as error:
                logger.warning("controller not up yet (%d): %r", attempt, error)
                await asyncio.sleep(PING_S)

    async def _configure(self, patience_s: float = PATIENCE_S) -> None:
        if self.table is not None:
            tiers = msgspec.msgpack.encode(self.table.to_table())
            await asyncio.wait_for(self.transport.configure(self._options, tiers, self._shards), patience_s)

    async def _look(self) -> None:
        """Gauges as the status is now, and an open channel from every replica that lives."""
        if self.table is not None:
            status = await self.status()
            self.metrics.observe_status(status)
            self.dispatcher.listen([r["replica"] for r in status["replicas"] if r["live"]])

    async def _ping(self) -> None:
        """Keep the controller configured, also a reborn one, and the gauges fresh, also without it."""
        while True:
            for step in (self._configure, self._look):
                try:
                    await step()
                except Exception as error:
                    logger.warning("controller not reached: %r", error)
            self._garbage.note(is_idle=not self.dispatcher.requests)
            await asyncio.sleep(PING_S)


def within_prefix(scope: Message) -> Message:
    """The scope with its path below Serve's ``route_prefix``. ASGI's ``path`` includes what ``root_path`` says."""
    root, path = scope.get("root_path", "").rstrip("/"), scope.get("path", "")
    if not root or not (path == root or path.startswith(f"{root}/")):
        return scope
    below = path[len(root) :] or "/"
    return {**scope, "path": below, "root_path": "" if below.startswith(root) else root}
