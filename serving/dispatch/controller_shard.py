"""One of several shards of the controller, as this ingress knows it: whether it answers, how loaded it says it is."""

import asyncio
import logging
import math
from collections.abc import Coroutine
from typing import Any

from protocol.messages import AdmissionRequest, Decision
from protocol.shards import LEADER
from serving.dispatch.controller_link import ControllerLink

logger = logging.getLogger("polyslo.dispatch")

SHARD_ANSWER_S = 0.25  # that one of several shards may take to decide, or to tell its load
MOST_PING_S = 30.0  # a newborn shard compiles its kernels first
PAUSE_S = 0.2  # before a shard that failed is reached or listened to again


class Shard:
    """A link, and what goes on over it; nothing of that disturbs another shard."""

    def __init__(self, link: ControllerLink, answers: bool) -> None:
        """``answers``: whether it may be asked before it has answered a ping."""
        self.link, self.answers = link, answers
        self.load = math.inf  # as told last; inf: it has no replica that takes requests, or has not told
        self._pinging: asyncio.Task[None] | None = None
        self._hearing: asyncio.Task[list[str]] | None = None
        self._reaching: asyncio.Task[None] | None = None

    @property
    def number(self) -> int:
        return self.link.shard

    # -- is it there ------------------------------------------------------------------------------------------------

    def ping(self, options: bytes, tiers: bytes) -> "asyncio.Task[None]":
        """Configure it and ask for its load; one ping at a time, for it may take long. The task raises as that does."""
        if self._pinging is None or self._pinging.done():
            self._pinging = _begun(self._ping(options, tiers))
        return self._pinging

    async def _ping(self, options: bytes, tiers: bytes) -> None:
        try:
            if self.number == LEADER or not self.answers:  # asking Ray for each of them all the time costs too much
                await self.link.start()
            await asyncio.wait_for(self.link.configure(options, tiers), MOST_PING_S)
        except Exception:
            self.answers = False
            raise
        await self.ask_load()
        self.answers = True
        if self.number != LEADER and self._reaching is None:
            self._reaching = _begun(self._keep_reaching())

    async def ask_load(self) -> bool:
        """Whether it has told its load, without which nobody asks it first; a newborn one waits for a replica."""
        try:
            self.load = (await asyncio.wait_for(self.link.admit([]), SHARD_ANSWER_S)).load
        except Exception as error:
            logger.debug("shard %d does not tell its load: %r", self.number, error)
            self.load = math.inf
            return False
        return True

    def note_late_ping(self) -> None:
        """A shard whose ping is not over is asked nothing until it is."""
        self.answers &= self._pinging is None or self._pinging.done()

    async def _keep_reaching(self) -> None:
        """Hold a socket to it, made anew whenever it breaks."""
        while True:
            try:
                await self.link.reach()
            except Exception as error:
                logger.debug("no socket to shard %d: %r", self.number, error)
            await asyncio.sleep(PAUSE_S)

    # -- what it says -----------------------------------------------------------------------------------------------

    def decisions(self, asked: "asyncio.Task[Any]") -> list[Decision] | None:
        """The answer to a question, if it is there; without one, the shard is asked nothing more."""
        if not asked.done() or asked.exception():
            reason = asked.exception() if asked.done() else "it is silent"
            logger.info("shard %d of the controller did not answer: %r", self.number, reason)
            self.answers = False
            return None
        self.load = asked.result().load
        return list(asked.result().decisions)

    def question(self, questions: list[AdmissionRequest], most_s: float) -> "asyncio.Task[Any]":
        """A question that goes on for up to ``most_s``, whoever waits for it."""
        return _begun(asyncio.wait_for(self.link.admit(questions), most_s))

    def hearing(self, may_ask: bool = True) -> "asyncio.Task[list[str]] | None":
        """The open question about recalls; where there is none, a new one if it ``may_ask``."""
        if self._hearing is None and may_ask:
            self._hearing = _begun(self._hear())
        return self._hearing

    def take_heard(self) -> list[str]:
        """What the question about recalls was answered, if it was."""
        task, heard = self._hearing, list[str]()
        if task is not None and task.done():
            self._hearing, heard = None, [] if task.cancelled() else task.result()
        return heard

    async def _hear(self) -> list[str]:
        """Its recalls; none, after a pause, where it is away."""
        try:
            return await self.link.hear_recalls()
        except Exception as error:
            logger.debug("no recalls of shard %d are heard: %r", self.number, error)
            await asyncio.sleep(PAUSE_S)
            return []

    def close(self) -> None:
        self.link.close()
        for task in (self._pinging, self._hearing, self._reaching):
            if task is not None:
                task.cancel()


def _begun(work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
    """A task whose error is heard by whoever wants it, and by nobody else."""
    task = asyncio.get_running_loop().create_task(work)
    task.add_done_callback(lambda task: task.cancelled() or task.exception())
    return task
