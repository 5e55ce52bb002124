"""What a replica does with other actors: report to the controller. Imports ray."""

import asyncio
import contextlib
import random
from collections.abc import Callable
from typing import Any

import msgspec
import ray

from protocol.messages import Report, Start
from protocol.report_answers import POSITIONS_READ, TELL_ALL, next_shard, pause_s, shards
from protocol.shards import LEADER, shard_name

LEAST_PAUSE_S = 0.01  # whatever a controller asks for
START_S = 1.0  # how often a replica that starts says so
ANSWER_S = 2.0  # a controller that does not answer by then is looked up again
SHARD_ANSWER_S = 1.0  # the same where another shard may take the replica
MOVED_S = 0.1  # until the next report, after one that its shard did not take


class Reporter:
    """Sends one report at a time, so that none pile up while the controller is away or slow.

    Where there are several shards, the leader says which one to report to. A replica whose shard does not answer
    reports to the leader, or without that to any other.
    """

    def __init__(self, name: str, namespace: str, interval_s: float) -> None:
        """``name``: of the controller; empty: nobody hears reports."""
        self._name, self._namespace = name, namespace
        self._interval_s = interval_s
        self._shard, self._shards = LEADER, 1
        self._actor: Any = None  # of the shard
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
            answer = await self._send("report", msgspec.msgpack.encode(report)) if self._name else None
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
                await self._send("on_start", msgspec.msgpack.encode(start))
            await asyncio.sleep(START_S)

    def _go_to(self, shard: int) -> None:
        self._shard, self._actor = shard, None

    async def _send(self, method: str, message: bytes) -> str | None:
        """The controller's answer; none where it gave none."""
        try:
            if self._actor is None:
                name = shard_name(self._name, self._shard)
                self._actor = await asyncio.to_thread(ray.get_actor, name, self._namespace or None)
            answer = asyncio.wrap_future(getattr(self._actor, method).remote(message).future())
            patience_s = ANSWER_S if self._shards == 1 else SHARD_ANSWER_S
            return str(await asyncio.wait_for(answer, patience_s))
        except (ValueError, TimeoutError, ray.exceptions.RayError):
            self._go_to(self._next())  # not born yet, reborn under the same name, or busy
            return None

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
