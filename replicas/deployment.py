"""The Serve deployment around replicas: one process that hosts one of them, or several whose engines are simulated.

The only replica file, beside the router and the reporter, that knows Ray.
"""

import asyncio
import contextlib
import os
import random
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import ray
from ray import serve

from protocol.garbage import no_collections, settle
from protocol.names import replica_name
from replicas.config import controller_name, replica_config
from replicas.hosted import HostedReplica
from replicas.logs import log_to_stderr
from replicas.reporter import Reporter

RAY_ADDRESS = "RAY_ADDRESS"  # Ray's variable: without it an engine's process would find another cluster, or none
USER_CONFIG_KEYS = ("policy", "policy_options", "draining")


class Replica:
    """A process of Serve's and the replicas in it. Make it a deployment with ``replica_deployment``.

    Where it hosts several, each call says which by the name; a call without a name is for the only one.
    """

    async def __init__(self, settings: dict[str, Any]) -> None:  # type: ignore[misc] # Serve awaits it
        config, context = replica_config(settings), serve.get_replica_context()
        process_id = context.replica_id.unique_id
        config = msgspec.structs.replace(config, log_prefix=f"[{replica_name(config.group, process_id, 0, 1)}] ")
        self._config = config
        if config.is_placed:
            os.environ[RAY_ADDRESS] = ray.get_runtime_context().gcs_address  # where its workers are
        log_to_stderr(config.log_level, config.log_prefix)
        controller = controller_name(config.controller_name, context.app_name)
        self._hosted: dict[str, HostedReplica] = {}
        for number in range(config.per_process):
            name = replica_name(config.group, process_id, number, config.per_process)
            reporter = Reporter(controller, config.controller_namespace, config.report_interval_s)
            self._hosted[name] = HostedReplica(config, name, reporter)
        with no_collections():
            await asyncio.gather(*(each.start() for each in self._hosted.values()))
        settle()
        for each in self._hosted.values():
            each.begin()

    def _named(self, name: str) -> HostedReplica:
        """The replica of this name; without one, any."""
        if not name:
            return random.choice(list(self._hosted.values()))
        if name not in self._hosted:
            raise ValueError(f"replica: {name!r} is not one of {', '.join(self._hosted)}")
        return self._hosted[name]

    async def channel(self, ingress_id: str, link: bytes, replica: str = "") -> AsyncIterator[bytes]:
        """``HostedReplica.channel``."""
        async with contextlib.aclosing(self._named(replica).channel(ingress_id, link)) as messages:
            async for message in messages:
                yield message

    async def submit(self, ingress_id: str, batch: bytes, replica: str = "") -> bytes:
        """``HostedReplica.submit``."""
        return await self._named(replica).submit(ingress_id, batch)

    async def abort(self, request_ids: list[str], replica: str = "") -> None:
        """End requests; unknown ones are ignored."""
        await self._named(replica).abort(request_ids)

    async def take(self, key: str, replica: str = "") -> bytes:
        """``HostedReplica.take``."""
        return await self._named(replica).take(key)

    async def info(self, replica: str = "") -> dict[str, Any]:
        """Who this is."""
        return self._named(replica).info()

    async def drain(self, draining: bool = True) -> None:
        """Tell the controller to send nothing new; what runs here finishes."""
        for each in self._hosted.values():
            each.drain(draining)

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Apply Serve's ``user_config`` in place: ``policy``, ``policy_options``, ``draining``."""
        for key in user_config:
            if key not in USER_CONFIG_KEYS:
                raise ValueError(f"user_config: unknown key {key!r}, known: {', '.join(USER_CONFIG_KEYS)}")
        if "draining" in user_config:
            await self.drain(bool(user_config["draining"]))
        if "policy" in user_config or "policy_options" in user_config:
            policy = user_config.get("policy", self._config.policy)
            options = user_config.get("policy_options", self._config.policy_options)
            for each in self._hosted.values():
                await each.configure(policy, options)

    async def check_health(self) -> None:
        """Serve's question: raises when an engine is dead or hung, or when a task of a replica ended."""
        for each in self._hosted.values():
            each.check()

    def __del__(self) -> Any:
        """Serve's farewell, which awaits the result; Python's own call, later, finds nothing left to do."""
        hosted = self.__dict__.pop("_hosted", None)
        return self._end(hosted) if hosted else None

    @staticmethod
    async def _end(hosted: dict[str, HostedReplica]) -> None:
        for each in hosted.values():
            await each.stop()


def replica_deployment(settings: dict[str, Any], **options: Any) -> Any:
    """A bound Serve application node of ``Replica``; ``options`` go to ``serve.deployment``."""
    from ray.serve.config import RequestRouterConfig

    defaults: dict[str, Any] = dict(
        name="Replica",
        max_ongoing_requests=10_000,
        request_router_config=RequestRouterConfig(request_router_class="replicas.pinned_router:PinnedRouter"),
        health_check_period_s=2,
        health_check_timeout_s=10,
        graceful_shutdown_timeout_s=5,
        graceful_shutdown_wait_loop_s=0.2,
    )
    return serve.deployment(Replica, **(defaults | options)).bind(settings)
