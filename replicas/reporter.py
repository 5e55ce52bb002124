"""What a replica does with other actors: report to the controller. Imports ray."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import msgspec
import ray

from protocol.messages import Report, Start
from protocol.report_answers import POSITIONS_READ, TELL_ALL, pause_s

LEAST_PAUSE_S = 0.01  # whatever a controller asks for
START_S = 1.0  # how often a replica that starts says so
ANSWER_S = 2.0  # a controller that does not answer by then is looked up again


class Reporter:
    """Sends one report at a time, so that none pile up while the controller is away or slow."""

    def __init__(self, name: str, namespace: str, interval_s: float) -> None:
        self._name, self._namespace = name, namespace
        self._interval_s = interval_s
        self._actor: Any = None
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
            report = build()
            answer = await self._send("report", msgspec.msgpack.encode(report)) if self._name else None
            if answer == TELL_ALL:
                forgotten()
            elif answer is not None:
                sent(report)
                if not answer.startswith(POSITIONS_READ):
                    forgotten()
            if report.requests or report.positions:
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

    async def _send(self, method: str, message: bytes) -> str | None:
        """The controller's answer; none where it gave none."""
        try:
            if self._actor is None:
                self._actor = await asyncio.to_thread(ray.get_actor, self._name, self._namespace or None)
            answer = asyncio.wrap_future(getattr(self._actor, method).remote(message).future())
            return str(await asyncio.wait_for(answer, ANSWER_S))
        except (ValueError, TimeoutError, ray.exceptions.RayError):
            self._actor = None  # not born yet, reborn under the same name, or busy
            return None


async def cancel(tasks: list["asyncio.Task[None]"]) -> None:
    """Cancel tasks and wait for their end."""
    for task in tasks:
        task.cancel()
    for task in tasks:
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task
