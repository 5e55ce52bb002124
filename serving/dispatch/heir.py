"""How an ingress of a later deploy has an actor with other code followed by one with its own (``Succession``).

Knows Ray.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import ray

from controller.succession import Greeting

ENDED_S = 10.0  # that Ray may take to give the name of an ended actor free
LOOK_S = 0.02

logger = logging.getLogger("polyslo.dispatch")


class Heir:
    """Greets one actor until both agree whose code it is to run, and has it followed where this ingress is chosen."""

    def __init__(self, code: str, ingress_id: str, succeed: Callable[[], Awaitable[None]]) -> None:
        """``succeed`` ends the actor and starts the next; the actor serves on until then."""
        self.number = 0  # of this ingress's deploy, as an actor said
        self.is_agreed = False  # with the actor that the ingress speaks to now
        self._code, self._ingress_id, self._succeed = code, ingress_id, succeed
        self._succeeding: asyncio.Task[None] | None = None

    async def greet(self, actor: Any, ask: Callable[..., Awaitable[Any]], application: str, deploy: str) -> None:
        """``ask(method, *arguments)`` asks the ``actor``. Raises what that does."""
        if self.is_agreed:
            return
        if hasattr(actor, "greet"):
            told: Greeting = await ask("greet", application, deploy, self.number, self._code, self._ingress_id)
        else:  # a version that cannot be greeted has other code, and no ingress of it would end a later one
            told = {"number": self.number, "is_over": True, "is_heir": True}
        self.number, self.is_agreed = told["number"], not told["is_over"]
        if told["is_heir"] and (self._succeeding is None or self._succeeding.done()):
            self._succeeding = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        try:
            await self._succeed()
        except Exception as error:
            logger.warning("no actor of this deploy's code yet: %r", error)

    def close(self) -> None:
        """Leave it to another ingress."""
        if self._succeeding is not None:
            self._succeeding.cancel()


async def end_actor(actor: Any, name: str, namespace: str) -> None:
    """End a named actor for good, and wait until its name is free or another one has it.

    Raises ``TimeoutError`` after ``ENDED_S``.
    """
    ray.kill(actor, no_restart=True)
    give_up_s = time.monotonic() + ENDED_S
    with contextlib.suppress(ValueError):
        while await asyncio.to_thread(ray.get_actor, name, namespace) == actor:
            if time.monotonic() > give_up_s:
                raise TimeoutError(f"Ray has not ended actor {name!r} within {ENDED_S:g} s")
            await asyncio.sleep(LOOK_S)
