"""Best effort that waits at the ingress because every replica holds as much of it as it may. Pure.

First come, first served, by arrival: a place that comes free belongs to the head of the line, and whoever asks goes in
if there are more free places than requests ahead of it. Nothing is pushed: each request is told when to ask again.
"""

from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass, field

ASK_S = (0.25, 10.0)  # least and most until a request asks again; replicas hold work for longer than the least
OF_WAIT = 0.7  # part of its expected wait after which a request asks again: a few questions each, however long the line
FIRST_RATE_PER_S = 400.0  # requests let in per second, until enough have been: the line's speed is found out early
SPREAD = 0.8  # of that time: requests of one burst do not all come back at once
GRACE_S = 1.0  # after it should have asked again, a request is taken to have left
SWEEP_S = 0.5  # between two looks for those that left
FRACTIONS = 1024

Position = tuple[int, float, int]  # rank, arrival, and a number that tells apart those of one instant


@dataclass
class BestEffortLine:
    """Who waits, by arrival, and how fast the line moves. A request keeps its position by its age alone."""

    ask_s_each: float = float("inf")  # a request asks again after so long per request ahead of it, at the latest
    _line: list[Position] = field(default_factory=list)  # sorted
    _where: dict[int, Position] = field(default_factory=dict)  # by uid
    _asks_s: dict[int, float] = field(default_factory=dict)  # when each should ask again
    _let_in_s: deque[float] = field(default_factory=lambda: deque(maxlen=64))
    _swept_s: float = float("-inf")
    _entries: int = 0

    def __len__(self) -> int:
        return len(self._line)

    def __contains__(self, uid: int) -> bool:
        return uid in self._where

    def wait_s(self, uid: int, arrival_s: float, free: int, now_s: float, rank: int = 0) -> float:
        """Seconds until the request should ask again; 0: it may take one of the ``free`` places. O(log n) to decide.

        Lower ranks go before all others. Whoever has another rank than before is ordered anew.
        """
        self._sweep(now_s)
        if (known := self._where.get(uid)) and known[0] != rank:
            self.leave(uid)
        position = self._where.get(uid) or (rank, arrival_s, self._entries)
        ahead = bisect_left(self._line, position)
        if ahead < free:
            if self._line:  # only a line tells how fast places come free
                self._let_in_s.append(now_s)
            self.leave(uid)
            return 0.0
        if uid not in self._where:
            insort(self._line, position)
            self._where[uid] = position
            self._entries += 1
        shift = 1.0 + SPREAD * ((uid % FRACTIONS) / FRACTIONS - 0.5)
        before = ahead - free + 1
        pause_s = min(max(OF_WAIT * before / self._rate_per_s(now_s), ASK_S[0]), ASK_S[1], before * self.ask_s_each)
        pause_s *= shift
        self._asks_s[uid] = now_s + pause_s
        return pause_s

    def is_first(self, uid: int) -> bool:
        """Whether the request is the head of the line."""
        return bool(self._line) and self._where.get(uid) == self._line[0]

    def leave(self, uid: int) -> None:
        """The request has a place, or has ended."""
        if (position := self._where.pop(uid, None)) is not None:
            del self._line[bisect_left(self._line, position)]
            del self._asks_s[uid]
            if not self._line:  # the next line may move at another speed
                self._let_in_s.clear()

    def _rate_per_s(self, now_s: float) -> float:
        """Requests let in per second, over the last ones."""
        if len(self._let_in_s) < 2:
            return FIRST_RATE_PER_S
        return len(self._let_in_s) / max(now_s - self._let_in_s[0], 1e-3)

    def _sweep(self, now_s: float) -> None:
        """Forget who did not ask again: its ingress is gone. One that is only late finds its position again by age."""
        if now_s - self._swept_s < SWEEP_S:
            return
        self._swept_s = now_s
        for uid in [uid for uid, asks_s in self._asks_s.items() if now_s > asks_s + GRACE_S]:
            self.leave(uid)
