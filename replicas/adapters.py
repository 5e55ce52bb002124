"""Which LoRA adapters may run together in one engine. Reads vLLM's requests by attribute; no vllm here.

vLLM takes at most ``max_loras`` adapters into a step, and counts those of the running requests that take part in it.
Here a running request may be left out of a step, and comes back with its adapter: so all that run are counted.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

PATIENCE_S = 1.0  # for which a request waits for a place for its adapter while others of those that run may begin


class AdapterRoom:
    """Lets no more than ``most`` adapters run at a time; 0: there are none to count."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._running: set[int] = set()

    def begin(self, running: Sequence[Any]) -> None:
        """A step is formed beside these."""
        if self._most:
            self._running = adapters_of(running)

    def takes(self, request: Any) -> bool:
        """Whether a request may run in the step being formed; if so, its adapter is counted."""
        if not self._most or request.lora_request is None:
            return True
        adapter = request.lora_request.lora_int_id
        if adapter not in self._running and len(self._running) >= self._most:
            return False
        self._running.add(adapter)
        return True

    def fitting(self, running: Sequence[Any], waiting: list[Any], urgency: Callable[[Any], Any]) -> list[Any]:
        """Of the ``waiting`` requests, those whose adapters may run beside the ``running``: the most urgent first.

        A steady stream of one adapter would never end. So who has waited for ``PATIENCE_S`` lets none begin that is
        less urgent and has an adapter, until one of those that run has ended.
        """
        if not self._most or all(request.lora_request is None for request in waiting):
            return waiting
        chosen, fits, oldest_s = adapters_of(running), set[int](), time.time() - PATIENCE_S
        for request in sorted((each for each in waiting if each.lora_request is not None), key=urgency):
            adapter = request.lora_request.lora_int_id
            if adapter in chosen or len(chosen) < self._most:
                chosen.add(adapter)
                fits.add(id(request))
            elif request.arrival_time < oldest_s:
                break
        return [each for each in waiting if each.lora_request is None or id(each) in fits]


def adapters_of(requests: Sequence[Any]) -> set[int]:
    """The adapters of these requests."""
    return {request.lora_request.lora_int_id for request in requests if request.lora_request is not None}
