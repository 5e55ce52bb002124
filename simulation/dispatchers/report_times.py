"""When replicas report in virtual time: at their pace, and less often while the fleet has long had nothing to do."""

import math

RESTS_AFTER_S = 10.0  # without a request
IDLE_S = 1.0  # between two reports then: no replica falls silent by that


class ReportTimes:
    """``next_s``: when the next report of all replicas is due; inf: never."""

    def __init__(self) -> None:
        self.next_s = 0.0
        self._last_s, self._pause_s = 0.0, 0.0  # of the pace
        self._idle_since_s = math.inf
        self._rests = False

    def reported(self, now_s: float, pause_s: float, is_idle: bool) -> None:
        """All have reported, and do so every ``pause_s``."""
        self._idle_since_s = min(self._idle_since_s, now_s) if is_idle else math.inf
        self._rests = now_s - self._idle_since_s >= RESTS_AFTER_S and pause_s < IDLE_S
        self._last_s, self._pause_s = now_s, pause_s
        self.next_s = now_s + (IDLE_S if self._rests else pause_s)

    def wake(self, now_s: float) -> None:
        """There is something to do: the next report is due when it would be without the rest."""
        self._idle_since_s = math.inf
        if self._rests:
            pauses = math.floor((now_s - self._last_s) / self._pause_s) + 1
            self.next_s, self._rests = min(self.next_s, self._last_s + pauses * self._pause_s), False
