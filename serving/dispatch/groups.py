"""The sequences of one HTTP request (``n > 1``, several prompts, a batch of conversations), which are one decision.

They are asked about together, wait together, and are refused together; their timers end with them.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from protocol.messages import Decision, Verdict
from serving.dispatch.background import Tasks
from serving.dispatch.deciding import NO_REPLICA
from serving.dispatch.engine_request import EngineRequest
from serving.request.state import HttpRequestState

GATHER_S = 0.05  # that sequences wait for siblings that were announced; they come within a tick or two


class Group:
    """One request: its live sequences and everything that is to happen to them later."""

    def __init__(self, request_state: HttpRequestState) -> None:
        self.request_state = request_state
        self.requests: dict[str, EngineRequest] = {}
        self._is_gathered = False
        self._gathered: list[EngineRequest] = []
        self._timers: set[asyncio.TimerHandle] = set()

    def is_refused_by(self, decision: Decision) -> bool:
        """Whether this ends the request: it has no token, and has not just lost the only replica there was."""
        is_stranded = decision.reason == NO_REPLICA and any(request.is_moved for request in self.requests.values())
        return decision.verdict == Verdict.REFUSED and not self.request_state.is_started and not is_stranded

    def gather(self, request: EngineRequest, release: Callable[[], None]) -> list[EngineRequest]:
        """What to ask about now that ``request`` is to be decided: nothing while siblings are missing.

        ``release`` is called where they do not come; it asks about what there is (``take``). Siblings that come later
        than that are asked about by themselves.
        """
        if self._is_gathered:
            return [request]
        self._gathered.append(request)
        if len(self.request_state.sequences) >= self.request_state.expected:
            return self.take()
        if len(self._gathered) == 1:
            self.later(GATHER_S, release)
        return []

    def take(self) -> list[EngineRequest]:
        """The sequences that have waited for each other."""
        self._is_gathered = True
        gathered, self._gathered = self._gathered, []
        return [request for request in gathered if request.request_id in self.requests]

    def later(self, delay_s: float, callback: Callable[..., None], *arguments: Any) -> None:
        """Call back after a while, unless the request has ended by then."""

        def run() -> None:
            self._timers.discard(handle)
            callback(*arguments)

        handle = Tasks.later(delay_s, run)
        self._timers.add(handle)

    def leave(self, request: EngineRequest) -> None:
        """A sequence has ended; with the last one, the timers."""
        self.requests.pop(request.request_id, None)
        if not self.requests:
            self._gathered.clear()
            for handle in self._timers:
                handle.cancel()
            self._timers.clear()
