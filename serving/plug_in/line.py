"""The line of requests without objectives: vLLM serves them by arrival, and so does the plug-in. Pure.

The batch policy takes the shortest of them first. So it is shown only those at the head of the line, as many as one
iteration could hold; a head that waits for long is shown alone.
"""

from collections.abc import Sequence
from typing import Any

PATIENCE_S = 0.5  # for which the head of the line may be overtaken by what was shown beside it


class Line:
    """Who waits behind the head of the line. Reads vLLM's request objects by attribute."""

    def __init__(self, most_tokens: int) -> None:
        """``most_tokens``: of one iteration."""
        self._most_tokens = most_tokens
        self._head, self._since_s = "", 0.0

    def behind(self, running: Sequence[Any], waiting: Sequence[Any], now_s: float) -> set[Any]:
        """Of the ``waiting`` requests, those to leave out of the iteration that is formed now."""
        if not waiting:
            return set()
        begun = [request for request in running if uncomputed_tokens(request) > 1]
        line = [*begun, *sorted(waiting, key=lambda request: request.arrival_time)]
        if line[0].request_id != self._head:
            self._head, self._since_s = line[0].request_id, now_s
        room = 0 if now_s - self._since_s > PATIENCE_S else self._most_tokens
        room -= uncomputed_tokens(line[0])
        for place, request in enumerate(line[1:], 1):
            room -= uncomputed_tokens(request)
            if room < 0:
                return set(line[max(place, len(begun)) :])
        return set()


def uncomputed_tokens(request: Any) -> int:
    """Tokens of a request that are not in the KV cache yet."""
    left: int = request.num_tokens - request.num_computed_tokens
    return left
