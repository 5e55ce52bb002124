"""Work in the background: tasks and timers that do not end unnoticed, and what the ingress tells others in passing."""

import asyncio
import contextvars
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from protocol.messages import Delta, Outcome
from serving.dispatch.engine_request import Transport

logger = logging.getLogger("polyslo.dispatch")

NOTICE_S = 5.0  # that a notice may take
AGAIN_S, MOST_STRAYS = 1.0, 4096  # between two aborts of one attempt; attempts that are watched for that
RESTART_S = 0.1  # before work that failed begins anew


class Tasks:
    """Running tasks, held so that none is collected before it ends; every failure is logged with its traceback."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()
        self._endless: list[asyncio.Task[None]] = []

    def spawn(
        self, coroutine: Coroutine[Any, Any, None], on_failure: Callable[[Exception], None] | None = None
    ) -> "asyncio.Task[None]":
        """Run a coroutine; where it raises, ``on_failure`` is told, to fail what the task held."""
        # A fresh context: Serve cancels the calls made in a request's own context when that request ends.
        task = asyncio.get_running_loop().create_task(coroutine, context=contextvars.Context())
        self._running.add(task)
        task.add_done_callback(lambda task: self._note_end(task, on_failure))
        return task

    def _note_end(self, task: "asyncio.Task[None]", on_failure: Callable[[Exception], None] | None) -> None:
        self._running.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logger.error("task failed: %r", task.get_coro(), exc_info=error)
            if on_failure is not None and isinstance(error, Exception):
                _guarded(on_failure, error)

    def keep(self, work: Callable[[], Coroutine[Any, Any, None]]) -> "asyncio.Task[None]":
        """Run work that never ends: where it raises, it begins anew."""
        self._endless.append(self.spawn(_kept(work)))
        return self._endless[-1]

    def check(self) -> None:
        """Raise ``RuntimeError`` where work that never ends has ended."""
        for task in self._endless:
            if task.done():
                raise RuntimeError("a task of the dispatcher has ended")

    @staticmethod
    def soon(callback: Callable[..., None], *arguments: Any) -> None:
        """``callback(*arguments)`` at the end of this event-loop tick, with its failure logged."""
        asyncio.get_running_loop().call_soon(_guarded, callback, *arguments)

    @staticmethod
    def later(delay_s: float, callback: Callable[..., None], *arguments: Any) -> asyncio.TimerHandle:
        """``callback(*arguments)`` after a while, with its failure logged."""
        return asyncio.get_running_loop().call_later(delay_s, _guarded, callback, *arguments)

    async def close(self) -> None:
        for task in list(self._running):
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)


async def _kept(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    while True:
        try:
            await work()
        except Exception:
            logger.exception("task failed and begins anew: %s", getattr(work, "__qualname__", work))
        await asyncio.sleep(RESTART_S)


def _guarded(callback: Callable[..., None], *arguments: Any) -> None:
    try:
        callback(*arguments)
    except Exception:
        logger.exception("callback failed: %s", getattr(callback, "__qualname__", callback))


class BackgroundCalls:
    """Sent in the background; one may be lost, for the replicas' own reports and tokens repeat what they say."""

    def __init__(self, transport: Transport, tasks: Tasks) -> None:
        self._transport, self._tasks = transport, tasks
        self._outcomes: list[Outcome] = []
        self._aborts: dict[str, list[str]] = {}
        self._strays_s: dict[tuple[str, str], float] = {}  # by replica and attempt: when tokens of it came, or an abort

    def ended(self, outcome: Outcome) -> None:
        """Tell the controller, all of one event-loop tick together."""
        if not self._outcomes:
            self._tasks.soon(self._flush)
        self._outcomes.append(outcome)

    def _flush(self) -> None:
        outcomes, self._outcomes = self._outcomes, []
        self._tasks.spawn(quietly(self._transport.on_outcomes, outcomes))

    def abort(self, replica: str, attempt_id: str) -> None:
        """End a request on a replica, all of one event-loop tick together."""
        if not self._aborts:
            self._tasks.soon(self._flush_aborts)
        self._aborts.setdefault(replica, []).append(attempt_id)

    def note_stray(self, replica: str, delta: Delta) -> None:
        """Tokens came of an attempt that nobody wants any more: where they go on for ``AGAIN_S`` its abort was lost."""
        name, now_s = (replica, delta.request_id), time.monotonic()
        seen_s = self._strays_s.setdefault(name, now_s)
        if delta.finish:
            del self._strays_s[name]
        elif now_s - seen_s > AGAIN_S:
            self._strays_s[name] = now_s
            self.abort(*name)
        if len(self._strays_s) > MOST_STRAYS:
            del self._strays_s[next(iter(self._strays_s))]

    def _flush_aborts(self) -> None:
        aborts, self._aborts = self._aborts, {}
        for replica, attempt_ids in aborts.items():
            self._tasks.spawn(quietly(self._transport.abort, replica, attempt_ids))

    def failed(self, replica: str) -> None:
        """Tell the controller that a replica failed."""
        self._tasks.spawn(quietly(self._transport.on_failed, replica))


async def quietly(call: Callable[..., Awaitable[None]], *arguments: Any) -> None:
    """Make a call that may be lost, within ``NOTICE_S``."""
    try:
        await asyncio.wait_for(call(*arguments), NOTICE_S)
    except Exception as error:
        logger.debug("notice lost: %r", error)
