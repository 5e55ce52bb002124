"""Requests that perhaps ended an engine: each is tried once more, alone, before it shares an engine with the others.

An engine that dies takes every request on it down, and any of them may be the cause: one at its first iteration, or one
that has decoded for long. Offered again together they would end the next engine too. So each goes to a replica on which
no other suspect is tried, streams before requests without a token, and what ends a second engine ends with an error.
A token acquits. Streams wait for their trial for ``STREAMS_S`` at most: a fleet without room moves them together.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from serving.dispatch.background import Tasks
from serving.dispatch.engine_request import EngineRequest

LOOK_S = 0.1
STAGGER_S = 0.02  # between the beginnings of two trials, so that the second knows where the first one is
SETTLE_S = 2.0  # that the other streams get to move
STREAMS_S = 2.0  # that streams are kept back at most
MOST_ENDS = 3  # engines that may die under a request although it had tokens from each of them
CALM_S = 60.0  # an engine that has run with a request for so long was not ended by it


class Quarantine:
    """``enqueue`` offers requests again; ``is_settled`` tells whether no stream is on its way to another replica."""

    def __init__(self, enqueue: Callable[[list[EngineRequest]], None], is_settled: Callable[[], bool]) -> None:
        self._enqueue, self._is_settled = enqueue, is_settled
        self._held: OrderedDict[int, EngineRequest] = OrderedDict()  # by identity, in the order of their trials
        self._trials: dict[str, EngineRequest] = {}  # by the request's id
        self._settle_until_s = self._streams_until_s = 0.0
        self._look_at: asyncio.TimerHandle | None = None

    def suspects(self, requests: Iterable[EngineRequest]) -> tuple[list[EngineRequest], list[EngineRequest]]:
        """Of the requests of an engine that died: those proved guilty, and those suspected of it."""
        now_s, requests = time.monotonic(), list(requests)
        taken = [request for request in requests if request.is_acknowledged]
        for request in taken:
            request.ends = 1 if now_s - request.placed_s > CALM_S else request.ends + 1
        guilty = [request for request in requests if request.on_trial or request.ends >= MOST_ENDS]
        return (guilty, []) if guilty else ([], taken)

    def hold(self, requests: Sequence[EngineRequest]) -> None:
        """Keep suspects back until the others have moved; streams are tried first."""
        if not requests:
            return
        now_s = time.monotonic()
        for request in requests:
            request.unplaced_since_s = request.unplaced_since_s or now_s  # all wait for a replica, not the first alone
        self._hold_in_order(sorted((*self._held.values(), *requests), key=lambda request: request.is_fresh))
        self._settle_until_s, self._streams_until_s = now_s + SETTLE_S, now_s + STREAMS_S
        self._look_in(0.0)

    def _hold_in_order(self, requests: Iterable[EngineRequest]) -> None:
        self._held = OrderedDict((id(request), request) for request in requests)

    def is_held(self, request: EngineRequest) -> bool:
        return id(request) in self._held

    def busy_replicas(self) -> tuple[str, ...]:
        """Replicas on which a trial goes on: no other one begins there."""
        return tuple(request.replica for request in self._trials.values() if request.replica)

    def postpone(self, request: EngineRequest) -> None:
        """Its trial finds no replica without another trial now."""
        self._trials.pop(request.request_id, None)
        self._held[id(request)] = request
        self._held.move_to_end(id(request), last=False)
        self._look_in(LOOK_S)

    def acquit(self, request: EngineRequest) -> None:
        """It has a token, or has ended."""
        request.on_trial = False
        self._held.pop(id(request), None)
        if self._trials.pop(request.request_id, None) is not None:
            if request.replica:  # there is one: the time without begins anew for those that wait behind this trial
                now_s = time.monotonic()
                for held in self._held.values():
                    held.unplaced_since_s = now_s
            self._look_in(0.0)

    def _look_in(self, delay_s: float) -> None:
        """See to the next trial after ``delay_s``, whenever it was to be seen to before."""
        if self._look_at is not None:
            self._look_at.cancel()
        self._look_at = Tasks.later(delay_s, self._look) if self._held else None

    def _look(self) -> None:
        """Begin the next trial."""
        now_s = time.monotonic()
        if now_s < self._settle_until_s and not self._is_settled():
            self._look_in(LOOK_S)
        elif now_s > self._streams_until_s and (streams := [held for held in self._held.values() if not held.is_fresh]):
            self._hold_in_order([request for request in self._held.values() if request.is_fresh])
            self._settle_until_s = now_s + SETTLE_S
            for request in streams:
                request.on_trial = False
            self._enqueue(streams)
            self._look_in(LOOK_S)
        elif self._held:
            _, request = self._held.popitem(last=False)
            request.on_trial = True
            self._trials[request.request_id] = request
            self._enqueue([request])
            self._look_in(STAGGER_S)
