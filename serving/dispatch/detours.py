"""How much longer than at best tokens take from their replicas to the clients of this ingress."""

import asyncio
import time

from protocol.messages import Slo

HALF_S = 15.0  # ways are remembered so long, and at most twice so long
MOST_S = 0.1  # longer ways are broken promises, from which the margins of tiers follow
SHARE = 0.2  # of the time that an objective allows, which the way may take at most
HOPS = 4  # turns of the event loop that a token needs from the socket to its connection


class _Extremes:
    """The least and the longest way of late, in two halves of a window."""

    def __init__(self, way_s: float, now_s: float) -> None:
        self._now = self._before = (way_s, way_s)
        self._end_s = now_s + HALF_S

    def record(self, way_s: float, now_s: float) -> None:
        if now_s > self._end_s:
            self._before = self._now if now_s <= self._end_s + HALF_S else (way_s, way_s)
            self._now, self._end_s = (way_s, way_s), now_s + HALF_S
        self._now = min(self._now[0], way_s), max(self._now[1], way_s)

    def spread_s(self, now_s: float) -> float:
        """What the longest way took beyond the least; 0 once both are forgotten."""
        if now_s > self._end_s + HALF_S:
            return 0.0
        before = self._before if now_s <= self._end_s else self._now
        return max(self._now[1], before[1]) - min(self._now[0], before[0])


class Detours:
    """What the way of tokens took at most of late: in sockets, in wait for this event loop, and through it.

    Every token of a stream has its deadline, and one pause delays those of many streams. So it is the longest way that
    counts, less the shortest one: clocks of two machines differ by what is not known (the clock filter of NTP, RFC
    5905, section 10).
    """

    def __init__(self) -> None:
        self._ways: dict[str, _Extremes] = {}  # by replica
        self._passing: list[tuple[str, float]] = []  # messages whose tokens are on their way through the event loop
        self._began_s = 0.0
        self.loop_s = 0.0  # that the last ones took through it

    def most_s(self, slo: Slo, now_s: float) -> float:
        """By how much earlier than it is due a token of this objective should leave its engine to be on time."""
        spread_s = max((ways.spread_s(now_s) for ways in self._ways.values()), default=0.0)
        return min(spread_s, MOST_S, SHARE * min(slo.ttft_s, slo.e2e_s))

    def arrived(self, replica: str, sent_s: float) -> None:
        """A message has come that the replica's clock says it sent at ``sent_s``; to be called on the event loop."""
        if not self._passing:
            self._began_s = time.monotonic()
            self._turn(HOPS)
        self._passing.append((replica, sent_s))

    def forget(self, replica: str) -> None:
        """The replica's channel has ended."""
        self._ways.pop(replica, None)

    def _turn(self, left: int) -> None:
        if left:
            asyncio.get_running_loop().call_soon(self._turn, left - 1)
            return
        now_s, passing, self._passing = time.monotonic(), self._passing, []
        self.loop_s = now_s - self._began_s
        for replica, sent_s in passing:
            self.record(replica, now_s - sent_s, now_s)

    def record(self, replica: str, way_s: float, now_s: float) -> None:
        """One message took ``way_s`` by the difference of two clocks."""
        if replica not in self._ways:
            self._ways[replica] = _Extremes(way_s, now_s)
        self._ways[replica].record(way_s, now_s)
