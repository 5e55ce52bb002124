"""What each of several controllers does as its leader says: it keeps its part of all bounds and hands replicas over."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from controller.fleet import Fleet
from controller.scaling.autoscaler import Autoscaler
from controller.shards.leader import Leader
from controller.shards.share import Share
from protocol.shards import LEADER, Part, ShardOrders, ShardReport


@dataclass
class Member:
    """Shard number ``shard``; the leader is one as well. ``size`` is its part of the fleet's, once that is known."""

    shard: int = LEADER
    leader: Leader = field(default_factory=Leader)  # asked by the leader alone
    size: Part | None = None
    _leaving: dict[str, int] = field(default_factory=dict)  # replicas that are to report to another shard

    def report(self, fleet: Fleet, now_s: float) -> ShardReport:
        """What the leader is told."""
        staying = [replica for replica in self._reporting(fleet, now_s) if replica not in self._leaving]
        return ShardReport(self.shard, len(staying))

    def follow(self, fleet: Fleet, orders: ShardOrders, now_s: float) -> None:
        """Carry out what the leader says."""
        if fleet.allocation.set_share(Share(orders.place, orders.parts), now_s):
            fleet.allocation.write_roles(fleet.replicas)
        if (autoscaler := fleet.allocation.autoscaler) is not None:
            self._explain(autoscaler, orders.size, now_s)
        self.size = orders.size
        self._leaving = {name: shard for name, shard in self._leaving.items() if name in fleet.replicas}
        idlest = [name for name in self._idlest_first(fleet, now_s) if name not in self._leaving]
        for shard, count in orders.give:
            self._leaving |= dict.fromkeys(idlest[:count], shard)
            idlest = idlest[count:]

    def _explain(self, autoscaler: Autoscaler, size: Part | None, now_s: float) -> None:
        """Whether another part of the fleet's size is by hand, which an autoscaler takes every other size for."""
        before = self.size
        if before is None or size is None or before.moves != size.moves:
            autoscaler.target = autoscaler.target if before is size else None  # its part was cut anew
        elif size.hands > before.hands:
            autoscaler.held_until_s = now_s + autoscaler.options.manual_hold_s  # also where its part is the same
        elif size.replicas not in (before.replicas, autoscaler.target) and size.deployed == before.deployed:
            autoscaler.target = None  # what it had asked for and given up came to pass late

    def next_shard(self, fleet: Fleet, replica: str, now_s: float) -> int | None:
        """Where a replica that reports here is to report instead; none: it belongs here."""
        found = self._leaving.pop(replica, None)
        if found is not None:
            fleet.hand_over(replica, now_s)
        elif self.shard == LEADER and fleet.options.controller_shards > 1 and replica not in fleet.replicas:
            found = self.leader.home(now_s)
        return None if found == self.shard else found

    @staticmethod
    def _reporting(fleet: Fleet, now_s: float) -> list[str]:
        return [view.name for view in fleet.views(now_s) if view.is_reporting]

    @staticmethod
    def _idlest_first(fleet: Fleet, now_s: float) -> Sequence[str]:
        """Replicas that another shard may have: those that drain are at their end."""
        views = [view for view in fleet.views(now_s) if view.is_reporting and fleet.allocation.is_open(view.name)]
        return [view.name for view in sorted(views, key=lambda view: (view.load, view.best_effort, view.name))]
