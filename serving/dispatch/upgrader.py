"""How an ingress of a later deploy has an actor with other code followed by one with its own (``Upgrade``).

Knows Ray.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any
from weakref import WeakKeyDictionary

import ray

from controller.options import ON_HEAD
from controller.upgrade import Greeting

PREPARE_S = 240.0  # for an actor's kernels, of which some minutes are needed on a busy machine
AGAIN_S = 30.0  # after what failed
SETTLED_S = 3.0  # after which the next actor has what it needs from others
ENDED_S = 10.0  # that Ray may take to give the name of an ended actor free
LOOK_S = 0.02

logger = logging.getLogger("polyslo.dispatch")


class Upgrader:
    """Greets one actor until both agree whose code it is to run, and has it followed where this ingress is chosen."""

    def __init__(
        self,
        code: str,
        ingress_id: str,
        prepare: Callable[[], Awaitable[str]],
        upgrade: Callable[[Any], Awaitable[None]],
    ) -> None:
        """``prepare`` tells what code the next actor would run, and ``upgrade`` has an actor followed by that one. The
        actor serves on until then."""
        self.number = 0  # of this ingress's deploy, as an actor said
        self.is_agreed = False  # with the actor that the ingress speaks to now
        self._code, self._ingress_id, self._prepare, self._upgrade = code, ingress_id, prepare, upgrade
        self._upgrading: asyncio.Task[None] | None = None

    async def greet(self, actor: Any, ask: Callable[..., Awaitable[Any]], application: str, deploy: str) -> None:
        """``ask(method, *arguments)`` asks the ``actor``. Raises what that does."""
        if self.is_agreed:
            return
        # A version that cannot be greeted, or answers less, has other code; no ingress of it would end a later one.
        told: Greeting = {"code": "", "number": self.number, "is_over": True, "is_heir": True}
        if hasattr(actor, "greet"):
            told |= await ask("greet", application, deploy, self.number, self._code, self._ingress_id)
        self.number, self.is_agreed = told["number"], not told["is_over"]
        if told["is_heir"] and (self._upgrading is None or self._upgrading.done()):
            self._upgrading = asyncio.get_running_loop().create_task(self._run(actor, told["code"]))

    async def _run(self, actor: Any, code: str) -> None:
        try:
            async with turn():  # one after the other: while one is replaced, others decide
                async with asyncio.timeout(PREPARE_S):
                    next_code = await self._prepare()
                if next_code == code:
                    logger.warning("this node has other code (%s) than the head node (%s)", self._code, next_code)
                    self.is_agreed = True
                else:
                    await self._upgrade(actor)
                    await asyncio.sleep(SETTLED_S)
        except Exception as error:
            logger.warning("an actor with other code than this deploy's stays for now: %r", error)
            await asyncio.sleep(AGAIN_S)

    def close(self) -> None:
        """Leave it to another ingress."""
        if self._upgrading is not None:
            self._upgrading.cancel()


_turns: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()


def turn() -> asyncio.Lock:
    """Held by who replaces an actor, in this process: of several shards or models one at a time."""
    return _turns.setdefault(asyncio.get_running_loop(), asyncio.Lock())


async def in_new_process(function: Callable[[], Any]) -> Any:
    """What it returns on the head node, in a process that has read no code before and runs nothing after."""
    once = ray.remote(max_calls=1)(function)
    return await once.options(num_cpus=0, resources=ON_HEAD, max_retries=0).remote()


async def has_name(actor: Any, name: str, namespace: str) -> bool:
    """Whether it is this actor that others find by the name."""
    try:
        return bool(await asyncio.to_thread(ray.get_actor, name, namespace) == actor)
    except ValueError:
        return False


async def end_actor(actor: Any, name: str, namespace: str) -> None:
    """End a named actor for good, and wait until its name is free or another one has it.

    Raises ``TimeoutError`` after ``ENDED_S``.
    """
    ray.kill(actor, no_restart=True)
    give_up_s = time.monotonic() + ENDED_S
    while await has_name(actor, name, namespace):
        if time.monotonic() > give_up_s:
            raise TimeoutError(f"Ray has not ended actor {name!r} within {ENDED_S:g} s")
        await asyncio.sleep(LOOK_S)
