"""What the door tells others without waiting for an answer: how requests ended, whom to free, who failed."""

import asyncio
import contextvars
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from controller.wire import Outcome
from serving.jobs import Links

logger = logging.getLogger("polyslo.dispatch")

NOTICE_S = 5.0  # that a notice may take


class Tasks:
    """Running tasks, held so that none is collected before it ends."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        # A fresh context: Serve cancels the calls made in a request's own context when that request ends.
        task = asyncio.get_running_loop().create_task(coroutine, context=contextvars.Context())
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def close(self) -> None:
        for task in list(self._running):
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)


class Notices:
    """Sent in the background; one may be lost, for the replicas' own reports repeat what they say."""

    def __init__(self, links: Links, tasks: Tasks) -> None:
        self._links, self._tasks = links, tasks
        self._outcomes: list[Outcome] = []

    def ended(self, outcome: Outcome) -> None:
        """Tell the controller, all of one event-loop tick together."""
        if not self._outcomes:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outcomes.append(outcome)

    def _flush(self) -> None:
        outcomes, self._outcomes = self._outcomes, []
        self._tasks.spawn(_quietly(self._links.note_outcomes, outcomes))

    def abort(self, replica: str, wire_ids: Sequence[str]) -> None:
        """End requests on a replica."""
        self._tasks.spawn(_quietly(self._links.abort, replica, list(wire_ids)))

    def failed(self, replica: str) -> None:
        """Tell the controller that a replica failed."""
        self._tasks.spawn(_quietly(self._links.note_failed, replica))


async def _quietly(call: Callable[..., Awaitable[None]], *arguments: Any) -> None:
    try:
        await asyncio.wait_for(call(*arguments), NOTICE_S)
    except Exception as error:
        logger.debug("notice lost: %r", error)
