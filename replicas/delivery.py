"""How long an engine's outputs take to reach its replica. Pure."""

import numpy as np

WINDOW, EVERY = 2048, 64  # iterations that are remembered, and after how many the figure is taken anew
SHARE = 0.999  # of iterations; one late token of some hundred makes a stream late
MOST_S = 0.02  # a machine that takes longer is short of cores; margins that follow measured errors answer for that


class DeliveryTime:
    """What one of the last thousand iterations exceeds, by which an engine finishes tokens before they are due.

    A slack margin that is learnt from iterations does not contain it, and the more exact they are the less it covers.
    """

    def __init__(self) -> None:
        self.most_s = 0.0
        self._recent_s = np.zeros(WINDOW)
        self._count = 0

    def record(self, seconds: float) -> None:
        """One iteration's outputs came ``seconds`` after they were made."""
        self._recent_s[self._count % WINDOW] = seconds
        self._count += 1
        if self._count % EVERY == 0:
            known_s = self._recent_s[: min(self._count, WINDOW)]
            self.most_s = min(max(0.0, float(np.quantile(known_s, SHARE))), MOST_S)
