"""What a replica does with other actors: report to the controller, notice that an ingress died. Imports ray."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import msgspec
import ray

from protocol.messages import Report

SERVE_REPLICA = "SERVE_REPLICA::"  # how Serve's actor names begin; they end in "#" and the unique id
ANSWER_S = 2.0  # a controller that does not answer by then is looked up again


class Reporter:
    """Sends one report at a time, so that none pile up while the controller is away or slow."""

    def __init__(self, name: str, namespace: str, interval_s: float) -> None:
        self._name, self._namespace = name, namespace
        self._interval_s = interval_s
        self._actor: Any = None

    async def run(self, build: Callable[[], Report], sent: Callable[[Report], None]) -> None:
        """Report for ever; ``sent`` is called with each report that the controller has taken."""
        while True:
            report = build()
            if self._name and await self._send(msgspec.msgpack.encode(report)):
                sent(report)
            await asyncio.sleep(self._interval_s)

    async def _send(self, message: bytes) -> bool:
        try:
            if self._actor is None:
                self._actor = await asyncio.to_thread(ray.get_actor, self._name, self._namespace or None)
            await asyncio.wait_for(asyncio.wrap_future(self._actor.report.remote(message).future()), ANSWER_S)
        except (ValueError, TimeoutError, ray.exceptions.RayError):
            self._actor = None  # not born yet, reborn under the same name, or busy
            return False
        return True


def living_replicas() -> set[str]:
    """Serve's unique ids of all live Serve replicas in the cluster, ingresses among them. Asks Ray: blocks."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    return {actor["name"].rsplit("#", 1)[-1] for actor in actors if actor["name"].startswith(SERVE_REPLICA)}


async def cancel(tasks: list["asyncio.Task[None]"]) -> None:
    """Cancel tasks and wait for their end."""
    for task in tasks:
        task.cancel()
    for task in tasks:
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task
