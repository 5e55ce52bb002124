"""How well drafts do for nearly every stream: what a promise may count on, where the mean would break every second one.

Text that repeats itself is easy to guess, other text is not, so acceptance differs from stream to stream. Pure.
"""

import numpy as np

LEAST_STEPS = 8  # in which drafts of a stream were tested, before its acceptance counts as known
LEAST_STREAMS = 8  # with fewer that are known, nothing is promised
STREAMS = 128  # known ones that count, the latest
MOST_STREAMS = 1024  # that are remembered
QUANTILE = 0.1  # of the streams: nine of ten do at least as well
GRAIN = 0.02  # the bound is told in steps of this, so that it seldom changes
UPDATE_EVERY = 64  # tests


class StreamAcceptance:
    """A lower bound of the chance that a draft token is accepted, over streams; 0 while few are known."""

    def __init__(self) -> None:
        self.bound = 0.0
        self.is_known = False
        self._streams: dict[int, tuple[int, int, int]] = {}  # accepted, tested, steps; the latest last
        self._tests = 0

    def record(self, uid: int, accepted: int, refused: int) -> None:
        """Count draft tokens of one step of a stream that were accepted, and whether the next was ``refused`` (0 or 1).

        One that was wanted and that the proposer had nothing for counts as refused.
        """
        before = self._streams.pop(uid, (0, 0, 0))
        steps = before[2] + 1
        self._streams[uid] = before[0] + accepted, before[1] + accepted + refused, steps
        if len(self._streams) > MOST_STREAMS:
            del self._streams[next(iter(self._streams))]
        self._tests += 1
        if steps == LEAST_STEPS or self._tests % UPDATE_EVERY == 0:
            self._bound()

    def _bound(self) -> None:
        known = [accepted / tested for accepted, tested, steps in self._streams.values() if steps >= LEAST_STEPS]
        self.is_known = len(known) >= LEAST_STREAMS
        if self.is_known:
            lower = float(np.quantile(known[-STREAMS:], QUANTILE, method="lower"))
            self.bound = min(0.98, int(lower / GRAIN + 1e-9) * GRAIN)
