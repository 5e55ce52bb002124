"""When iterations start and end, as one engine's scheduler sees it. Clock readings are the caller's."""

from collections import deque

import numpy as np


class StepClock:
    """Measures completion to completion, so that a step is charged with all that happens between two of them.

    Under run-ahead the next step is formed while others are in flight; it starts when they have ended.
    """

    def __init__(self) -> None:
        self._in_flight: deque[tuple[np.ndarray, float, float]] = deque()  # composition, predicted seconds, begun
        self._ended_s = -np.inf
        self._is_continuing = False

    def next_start_s(self, now_s: float) -> float:
        """When a step that is formed now will start."""
        if not self._in_flight:
            return now_s
        return max(now_s, max(self._ended_s, self._in_flight[0][2]) + sum(step[1] for step in self._in_flight))

    def begin(self, now_s: float, mix: np.ndarray, predicted_s: float) -> None:
        """A step of this composition was handed over."""
        self._in_flight.append((mix, predicted_s, self._ended_s if self._is_continuing else now_s))

    def finish(self, now_s: float, is_continuing: bool) -> tuple[np.ndarray, float]:
        """The oldest step ended: its composition and seconds. ``is_continuing``: the engine has more to do at once.

        An output of no step, as connectors may bring, is an empty composition.
        """
        if not self._in_flight:
            return np.zeros(5), 0.0
        mix, _, begun_s = self._in_flight.popleft()
        seconds = now_s - max(begun_s, self._ended_s)
        self._ended_s, self._is_continuing = now_s, is_continuing
        return mix, seconds
