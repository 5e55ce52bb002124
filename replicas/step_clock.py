"""When iterations start and end, as one engine's scheduler sees it. Clock readings are the caller's."""

from collections import deque

import numpy as np

from planning.batch.composition import TOKENS


class StepClock:
    """Measures completion to completion, so that a step is charged with all that happens between two of them.

    Under run-ahead the next step is formed while others are in flight; it starts when they have ended. In a pipeline it
    starts when the one that is as many steps before it as there are stages has ended, and takes its way through all
    stages: so its seconds are those of the iteration-time model, however many share the pipeline.
    """

    def __init__(self, stages: int = 1) -> None:
        self._in_flight: deque[tuple[np.ndarray, float, float]] = deque()  # composition, predicted seconds, begun
        self._ends = deque([-np.inf] * stages, maxlen=stages)  # when the last steps finished, oldest first
        self._is_continuing = False
        self.formed_s = self.returned_s = -np.inf  # when the last step was formed, and when the last output came

    def next_start_s(self, now_s: float) -> float:
        """When a step that is formed now will start."""
        ends = self._ends.copy()
        for _, predicted_s, begun_s in self._in_flight:
            ends.append(max(begun_s, ends[0]) + predicted_s)
        return max(now_s, ends[0])

    @property
    def is_running(self) -> bool:
        """Whether a step is in flight."""
        return bool(self._in_flight)

    @property
    def is_computing(self) -> bool:
        """Whether a step with tokens is in flight: vLLM hands over empty ones as well."""
        return any(mix[TOKENS] > 0 for mix, _, _ in self._in_flight)

    @property
    def newest_s(self) -> float:
        """Predicted seconds of the last step formed, while it is in flight."""
        return self._in_flight[-1][1] if self._in_flight else 0.0

    def begin(self, now_s: float, mix: np.ndarray, predicted_s: float) -> None:
        """A step of this composition was handed over."""
        follows, self.formed_s = self._is_continuing and not self._in_flight, now_s
        self._in_flight.append((mix, predicted_s, self._ends[-1] if follows else now_s))

    def finish(self, now_s: float, is_continuing: bool) -> tuple[np.ndarray, float]:
        """The oldest step ended: its composition and seconds. ``is_continuing``: the engine has more to do at once.

        An output of no step, as connectors may bring, is an empty composition.
        """
        if not self._in_flight:
            return np.zeros(5), 0.0
        mix, _, begun_s = self._in_flight.popleft()
        seconds = now_s - max(begun_s, self._ends[0])
        self._ends.append(now_s)
        self._is_continuing = is_continuing
        return mix, seconds
