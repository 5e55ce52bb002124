"""Where each request is: told by decisions, corrected by reports. Pure.

Every row of a replica's table is noted here under that replica, and nothing else is.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from controller.mirror.replica_model import Synced, VirtualReplica


@dataclass
class RequestLocations:
    """The holder of each request, by uid; a request has one at a time."""

    replicas: dict[str, VirtualReplica]  # the fleet's own
    _where: dict[int, str] = field(default_factory=dict)

    def __contains__(self, uid: int) -> bool:
        return uid in self._where

    def __len__(self) -> int:
        return len(self._where)

    def holder(self, uid: int) -> str:
        """The replica that has the request; empty where none has."""
        return self._where.get(uid, "")

    def reconcile(self, uid: int, replica: VirtualReplica, now_s: float) -> None:
        """A request was given to a replica, which will hear of it."""
        replica.record_reserved(uid, now_s)
        self._where[uid] = replica.name

    def free(self, uid: int) -> None:
        """A request ended, or is about to be placed anew."""
        if (holder := self._where.pop(uid, None)) is not None:
            self.replicas[holder].release(uid)

    def follow(self, reporter: VirtualReplica, synced: Synced, now_s: float) -> None:
        """A replica has reported: what has gone from its table, and what has come into it.

        A stream that was sent elsewhere is let go: its replica will hear of it. But where the request never came to be,
        because the ingress did not hear the decision in time and chose by itself, the replica that reports it has it.
        """
        for uid in synced.gone:
            if self._where.get(uid) == reporter.name:
                del self._where[uid]
        for uid in synced.came:
            holder = self._where.setdefault(uid, reporter.name)
            if holder == reporter.name:
                continue
            if self.replicas[holder].has(uid, now_s):
                reporter.release(uid)
            else:
                self.replicas[holder].release(uid)
                self._where[uid] = reporter.name

    def forget(self, replica: VirtualReplica) -> list[int]:
        """A replica is about to lose all that it holds; returns what that is."""
        lost: list[int] = replica.table["id"].tolist()
        for uid in lost:
            self._where.pop(uid, None)
        return lost

    def release_unnoted(self) -> None:
        """Rows that are not noted go: a decision that failed half-way had put them there."""
        for name, replica in self.replicas.items():
            for uid in replica.table["id"].tolist():
                if self._where.get(uid) != name:
                    replica.release(uid)

    def check_sample(self, names: Iterable[str]) -> None:
        """``check_integrity`` of these replicas alone, whose cost the others do not raise."""
        for replica in (self.replicas[name] for name in names):
            replica.check_integrity()
            if astray := [uid for uid in replica.table["id"].tolist() if self._where.get(uid) != replica.name]:
                raise AssertionError(f"requests that are not where they were noted: {astray[:5]}")

    def check_integrity(self) -> None:
        """Every request is on one replica, the one noted, and every replica's table is sound and its own."""
        used = [replica.slot for replica in self.replicas.values()]
        if len(set(used)) < len(used):
            raise AssertionError(f"two replicas share a slot: {used}")
        seen: dict[int, str] = {}
        for name, replica in self.replicas.items():
            replica.check_integrity()
            ids = replica.table["id"].tolist()
            if twice := seen.keys() & set(ids):
                raise AssertionError(f"requests on two replicas: {sorted(twice)[:5]}")
            seen |= dict.fromkeys(ids, name)
        if seen != self._where:
            lost = sorted(uid for uid, _ in seen.items() ^ self._where.items())
            raise AssertionError(f"requests that are not where they were noted: {lost[:5]}")
