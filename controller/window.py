"""Counts and quantiles over the last minute, kept up outcome by outcome, so that reading them costs nothing. Pure.

Values fall into bins 1 % apart; what leaves the window is taken out a second at a time.
"""

import math
from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

BIN = math.log(1.01)
UNIT = 1e-6  # seconds; bins of smaller values are as wide as this
QUANTILES = (50, 95, 99)
MOST_SECONDS = 8  # that leave in one step, however long nobody looked

Key = Hashable


def bin_of(seconds: float) -> int:
    """The bin of a finite value; of -x it is the negative of that of x."""
    return round(math.copysign(math.log1p(abs(seconds) / UNIT) / BIN, seconds))


def middle_s(number: int) -> float:
    """The middle of a bin."""
    return math.copysign(math.expm1(abs(number) * BIN) * UNIT, number)


@dataclass
class SlidingCounts:
    """How often each key was noted within the last ``window_s``, to a second; keys of equal first parts are one
    family."""

    window_s: float
    counts: dict[Key, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
    _seconds: deque[tuple[int, dict[Key, Counter[int]]]] = field(default_factory=deque)  # oldest first

    def note(self, family: Key, number: int, now_s: float, times: int = 1) -> None:
        """Count ``number`` once more in its family."""
        self.note_all([(family, number)], now_s, times)

    def note_all(self, noted: Iterable[tuple[Key, int]], now_s: float, times: int = 1) -> None:
        """Count numbers once more, each in its family."""
        second = int(now_s)
        if not self._seconds or self._seconds[-1][0] != second:
            self.expire(now_s)
            self._seconds.append((second, defaultdict(Counter)))
        counts, latest = self.counts, self._seconds[-1][1]
        for family, number in noted:
            counts[family][number] += times
            latest[family][number] += times

    def expire(self, now_s: float) -> None:
        """Take out the seconds that have left the window: some at a time, or all at once."""
        if self._seconds and self._seconds[-1][0] < now_s - self.window_s:
            self._seconds.clear()
            self.counts.clear()
        for _ in range(MOST_SECONDS):
            if not self._seconds or self._seconds[0][0] >= now_s - self.window_s:
                return
            for family, noted in self._seconds.popleft()[1].items():
                counts = self.counts[family]
                for number, times in noted.items():
                    counts[number] -= times
                    if not counts[number]:
                        del counts[number]

    def quantiles_ms(self, family: Key) -> dict[str, float] | None:
        """P50, P95 and P99 in milliseconds of a family's bins, within 1 %; none when there is no value."""
        counts = self.counts.get(family)
        if not counts:
            return None
        numbers, total, at, below = sorted(counts), counts.total(), 0, 0
        found: dict[str, float] = {}
        for q in QUANTILES:
            while below + counts[numbers[at]] < q / 100.0 * total and at < len(numbers) - 1:
                below += counts[numbers[at]]
                at += 1
            found[f"p{q}"] = round(1000.0 * middle_s(numbers[at]), 3)
        return found
