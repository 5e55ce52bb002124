"""What the first of several controllers does for all: who is alive, where replicas belong, how totals are divided.

Soft state: every shard reports twice a second. Pure: time is an argument.
"""

from collections import Counter, deque
from dataclasses import dataclass, field

from controller.shards.share import split
from controller.shards.sizes import Sizes
from protocol.shards import LEADER, ShardOrders, ShardReport

SILENT_S = 1.5  # a shard that has not reported for so long is gone: its replicas go to the others
ARRIVE_S = 1.0  # a replica that was sent to a shard has reported there by then
MOST_MOVED = 0.1  # of a shard's replicas, that it hands over at a time


@dataclass
class Leader:
    """``shards``: that there are to be."""

    shards: int = 1
    sizes: Sizes = field(default_factory=Sizes)
    _heard: dict[int, tuple[int, float]] = field(default_factory=dict)  # replicas of each shard, and when it said so
    _sent: deque[tuple[float, int]] = field(default_factory=deque)  # replicas on their way to a shard

    def sync(self, report: ShardReport, now_s: float) -> ShardOrders:
        """A shard told its state; what it is to do."""
        self._heard[report.shard] = report.replicas, now_s
        live, counts = self.live(now_s), self._counts(now_s)
        give = self._give(report.shard, counts, now_s)
        if report.shard not in live:  # it is no more wanted
            return ShardOrders(0, max(1, len(live)), give)
        size = self.sizes.part(report.shard, counts) if self.shards > 1 else None
        return ShardOrders(live.index(report.shard), len(live), give, size)

    def live(self, now_s: float) -> list[int]:
        """Shards that report and are wanted, in order of their numbers; the leader always does."""
        heard = {shard for shard, (_, heard_s) in self._heard.items() if now_s - heard_s < SILENT_S}
        return sorted(shard for shard in heard | {LEADER} if shard < self.shards)

    def home(self, now_s: float) -> int:
        """The shard of a replica that is new here: the one that lacks most."""
        counts = self._counts(now_s)
        wants = self._wants(self.live(now_s), sum(counts.values()) + 1)
        found = max(wants, key=lambda shard: (wants[shard] - counts[shard], -shard))
        self._sent.append((now_s, found))
        return found

    def _counts(self, now_s: float) -> Counter[int]:
        """Replicas of each shard that reports, and those lately sent to it: for a moment some may count twice."""
        while self._sent and now_s - self._sent[0][0] > ARRIVE_S:
            self._sent.popleft()
        counts = Counter({shard: n for shard, (n, heard_s) in self._heard.items() if now_s - heard_s < SILENT_S})
        counts.update(shard for _, shard in self._sent)
        return counts

    def _wants(self, live: list[int], total: int) -> dict[int, int]:
        """Replicas that each live shard should have: as its autoscaler wants them, else as many as any other."""
        if self.sizes.parts.keys() == set(live) and sum(self.sizes.parts.values()) >= total:
            return self.sizes.parts
        return dict(zip(live, split(total, len(live)), strict=True))

    def _give(self, shard: int, counts: Counter[int], now_s: float) -> tuple[tuple[int, int], ...]:
        """What a shard hands over: its surplus, some replicas at a time, to those that lack most."""
        live = self.live(now_s)
        wants = self._wants(live, sum(counts.values()))
        has = self._heard[shard][0]
        left = has - wants.get(shard, 0)
        if shard in live:
            left = min(left, max(1, int(MOST_MOVED * has)))
        given = []
        for other in sorted(live, key=lambda each: counts[each] - wants[each]):
            if other != shard and (n := min(left, wants[other] - counts[other])) > 0:
                given.append((other, n))
                left -= n
                self._sent.extend([(now_s, other)] * n)
        return tuple(given)
