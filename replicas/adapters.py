"""Which LoRA adapters may run together in one engine. Reads vLLM's requests by attribute; no vllm here.

vLLM takes at most ``max_loras`` adapters into a step, and counts those of the running requests that take part in it.
Here a running request may be left out of a step, and comes back with its adapter: so all that run are counted.
"""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

PATIENCE_S = 1.0  # for which a request waits for a place for its adapter while others of those that run may begin
TURN_SHARE = 0.05  # of the time, at least, in which others wait for one that would never get a place


class Turn:
    """Of a request that has waited for ``aging_s`` and is never the most urgent: it goes first, until it ends.

    The next one follows after so long that turns take ``TURN_SHARE`` of the time, or the share of best effort.
    """

    def __init__(self) -> None:
        self._request: Any = None
        self._begun_s, self._next_s, self._placed_s = -math.inf, -math.inf, math.inf

    def has(self, request: Any) -> bool:
        """Whether it is this request's."""
        return request is self._request

    def begin(self, left_out: Sequence[Any], aging_s: float, now_s: float) -> None:
        """Give it to the eldest that found no place, if it has waited for long enough and one is due."""
        if self._request is None and now_s >= self._next_s and left_out:
            eldest = min(left_out, key=lambda each: each.arrival_time)
            if now_s - eldest.arrival_time > aging_s:
                self._request, self._begun_s, self._placed_s = eldest, now_s, math.inf

    def end(self, waiting: Sequence[Any], share: float, now_s: float) -> None:
        """It ends with the request, or where that has a place that nothing else lets it use."""
        if self._request is None:
            return
        is_unused = now_s - self._placed_s > PATIENCE_S and any(map(self.has, waiting))
        if is_unused or self._request.is_finished():
            self._next_s = now_s + (now_s - self._begun_s) * (1.0 / max(share, TURN_SHARE) - 1.0)
            self._request = None

    def note_place(self, request: Any, now_s: float) -> None:
        """This request may run."""
        if self.has(request):
            self._placed_s = min(self._placed_s, now_s)


class AdapterRoom:
    """Lets no more than ``most`` adapters run at a time; 0: there are none to count."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._running: set[int] = set()
        self._turn = Turn()

    def begin(self, running: Sequence[Any]) -> None:
        """A step is formed beside these."""
        if self._most:
            self._running = adapters_of(running)

    def fits(self, request: Any) -> bool:
        """Whether a request may run in the step being formed."""
        if not self._most or request.lora_request is None:
            return True
        return request.lora_request.lora_int_id in self._running or len(self._running) < self._most

    def take(self, request: Any) -> None:
        """A request that fits runs in the step being formed: its adapter is counted."""
        if self._most and request.lora_request is not None:
            self._running.add(request.lora_request.lora_int_id)

    def fitting(
        self,
        running: Sequence[Any],
        waiting: list[Any],
        loaded: Sequence[Any],
        urgency: Callable[[Any], Any],
        limits: np.void,
    ) -> list[Any]:
        """Of the ``waiting`` requests, those whose adapters may run beside the ``running``: the most urgent first.
        ``loaded`` ones, whose KV cache has come from elsewhere, ask for places, too.

        A steady stream of one adapter would never end. So who has waited for ``PATIENCE_S`` lets none begin that is
        less urgent and has an adapter, until one of those that run has ended. Nor does the one that has its ``Turn``.
        """
        asking = [each for each in (*waiting, *loaded) if each.lora_request is not None] if self._most else []
        if not asking:
            return waiting
        chosen, fits, now_s = adapters_of(running), set[int](), time.time()
        self._turn.end(asking, float(limits["best_effort_share"]), now_s)
        for request in sorted(asking, key=lambda each: (not self._turn.has(each), urgency(each))):
            adapter = request.lora_request.lora_int_id
            if adapter in chosen or len(chosen) < self._most:
                chosen.add(adapter)
                fits.add(id(request))
                self._turn.note_place(request, now_s)
            elif self._turn.has(request) or request.arrival_time < now_s - PATIENCE_S:
                break
        self._turn.begin([each for each in asking if id(each) not in fits], float(limits["aging_s"]), now_s)
        return [each for each in waiting if each.lora_request is None or id(each) in fits]


def adapters_of(requests: Sequence[Any]) -> set[int]:
    """The adapters of these requests."""
    return {request.lora_request.lora_int_id for request in requests if request.lora_request is not None}
