"""What a replica does with other actors: report to the controller. Imports ray."""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable
from typing import Any

import msgspec
import ray

from protocol.messages import Report
from protocol.report_answers import POSITIONS_READ, TELL_ALL, next_shard, pause_s, shards
from protocol.shards import LEADER, shard_name
from protocol.starts import Start
from replicas.report_link import ReportLink

LEAST_PAUSE_S = 0.01  # whatever a controller asks for
START_S = 1.0  # how often a replica that starts says so
ANSWER_S = 2.0  # a controller that does not answer by then is looked up again
SHARD_ANSWER_S = 1.0  # the same where another shard may take the replica
MOVED_S = 0.1  # until the next report, after one that its shard did not take
BY_RAY_S = 60.0  # how long reports go through Ray where a controller cannot be reached over a socket

UNANSWERED = (ValueError, ConnectionError, TimeoutError, ray.exceptions.RayError)

logger = logging.getLogger("polyslo.replica")


class Reporter:
    """Sends one report at a time, so that none pile up while the controller is away or slow.

    They go over a socket, whose address the controller tells; through Ray where that cannot be.
    Where there are several shards, the leader says which one to report to. A replica whose shard does not answer
    reports to the leader, or without that to any other.
    """

    def __init__(self, name: str, namespace: str, interval_s: float) -> None:
        """``name``: of the controller; empty: nobody hears reports."""
        self._name, self._namespace = name, namespace
        self._interval_s = interval_s
        self._shard, self._shards = LEADER, 1
        self._actor: Any = None  # of the shard
        self._link: ReportLink | None = None  # to the shard
        self._by_ray_until_s = 0.0
        self._has_work = asyncio.Event()

    def wake(self) -> None:
        """A replica that was idle has something to tell."""
        self._has_work.set()

    async def run(
        self, build: Callable[[], Report], sent: Callable[[Report], None], forgotten: Callable[[], None]
    ) -> None:
        """Report for ever; ``sent`` is called with each report that the controller has taken, ``forgotten`` where it
        does not know the requests that a report only moves.

        While there are requests, as often as the controller asks for, and at least every ``interval_s``.
        """
        while True:
            self._has_work.clear()
            report, shard = build(), self._shard
            answer = await self._report(report) if self._name else None
            if answer is not None and (other := next_shard(answer)) is not None:
                self._go_to(other)
            elif answer == TELL_ALL:
                forgotten()
            elif answer is not None:
                sent(report)
                self._shards = shards(answer) or self._shards
                if not answer.startswith(POSITIONS_READ):
                    forgotten()
            if shard != self._shard:
                forgotten()
                await asyncio.sleep(MOVED_S)
            elif report.requests or report.positions:
                await asyncio.sleep(min(self._interval_s, max(pause_s(answer or ""), LEAST_PAUSE_S)))
            else:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._has_work.wait(), self._interval_s)

    async def tell_start(self, build: Callable[[], Start]) -> None:
        """Tell for ever how far a start is."""
        while True:
            start = await asyncio.to_thread(build)
            if self._name:
                with contextlib.suppress(*UNANSWERED):
                    await self._ask("on_start", msgspec.msgpack.encode(start))
            await asyncio.sleep(START_S)

    def _go_to(self, shard: int) -> None:
        self.close()
        self._shard, self._actor = shard, None

    def close(self) -> None:
        """End the connection to the controller."""
        if self._link is not None:
            self._link.close()
            self._link = None

    async def _report(self, report: Report) -> str | None:
        """The controller's answer; none where it gave none."""
        message = msgspec.msgpack.encode(report)
        try:
            if (link := await self._reach(report.replica)) is None:
                return str(await self._ask("report", message))
            async with asyncio.timeout(self._patience_s):
                return await link.report(message)
        except UNANSWERED as error:
            if self._link is not None and not self._link.has_answered:
                logger.warning("reports go through Ray: the controller's socket does not answer: %r", error)
                self._by_ray_until_s = time.monotonic() + BY_RAY_S
            self._go_to(self._next())  # not born yet, reborn under the same name, or busy
            return None

    async def _reach(self, replica: str) -> ReportLink | None:
        """The socket to the shard; none where reports go through Ray."""
        if self._link is None and time.monotonic() >= self._by_ray_until_s:
            try:
                self._link = ReportLink(await self._ask("hear_reports", replica))
            except (AttributeError, ConnectionError) as error:  # a controller of an earlier version, or no socket to it
                logger.warning("reports go through Ray: %r", error)
                self._by_ray_until_s = time.monotonic() + BY_RAY_S
        return self._link

    async def _ask(self, method: str, argument: Any) -> Any:
        """What the shard answers through Ray; raises one of ``UNANSWERED`` where it does not."""
        if self._actor is None:
            name = shard_name(self._name, self._shard)
            self._actor = await asyncio.to_thread(ray.get_actor, name, self._namespace or None)
        answer = asyncio.wrap_future(getattr(self._actor, method).remote(argument).future())
        async with asyncio.timeout(self._patience_s):
            return await answer

    @property
    def _patience_s(self) -> float:
        return ANSWER_S if self._shards == 1 else SHARD_ANSWER_S

    def _next(self) -> int:
        """Who to report to where one's own shard does not answer."""
        others = range(1, self._shards)
        return LEADER if self._shard != LEADER or not others else random.choice(others)


async def cancel(tasks: list["asyncio.Task[None]"]) -> None:
    """Cancel tasks and wait for their end."""
    for task in tasks:
        task.cancel()
    for task in tasks:
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task
