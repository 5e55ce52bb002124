"""How well drafts do for nearly every stream: what a promise may count on, where the mean would break every second one.

Text that repeats itself is easy to guess, other text is not, so acceptance differs from stream to stream. Pure.
"""

from collections import deque

import numpy as np

WINDOW = 16  # draft tokens tested of one stream, for one sample of its acceptance
SAMPLES = 128  # that are remembered
LEAST_SAMPLES = 8  # with fewer, nothing is promised
QUANTILE = 0.1  # of the samples: nine of ten streams do at least as well
GRAIN = 0.02  # the bound is told in steps of this, so that it seldom changes
MOST_OPEN = 4096  # streams that are remembered before they have been tested enough


class StreamAcceptance:
    """A lower bound of the chance that a draft token is accepted, over streams; 0 while little is known."""

    def __init__(self) -> None:
        self.bound = 0.0
        self.is_known = False
        self._open: dict[int, tuple[int, int]] = {}  # by stream: accepted, tested
        self._samples: deque[float] = deque(maxlen=SAMPLES)

    def record(self, uid: int, accepted: int, refused: int) -> None:
        """Count draft tokens of a stream that were accepted, and whether its next one was ``refused`` (0 or 1).

        One that was wanted and that the proposer had nothing for counts as refused.
        """
        before = self._open.pop(uid, (0, 0))
        accepted, tested = before[0] + accepted, before[1] + accepted + refused
        if tested >= WINDOW:
            self._samples.append(accepted / tested)
            self._bound()
            return
        self._open[uid] = accepted, tested
        if len(self._open) > MOST_OPEN:
            del self._open[next(iter(self._open))]

    def _bound(self) -> None:
        self.is_known = len(self._samples) >= LEAST_SAMPLES
        if self.is_known:
            lower = float(np.quantile(self._samples, QUANTILE, method="lower"))
            self.bound = min(0.98, int(lower / GRAIN + 1e-9) * GRAIN)
