"""A replica's role, what it is decided by, and the roles that never change. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from controller.tiers import TierTable
from routing.mirrors import SHARED


class Kind(StrEnum):
    """What a replica is there for."""

    SERVES = "serves"  # a tier, and looser ones that have no room
    PENDING = "pending"  # lost the last request of its tier; ends what it carries, takes no SLO request
    POOL = "pool"  # best effort, until a tier needs it
    DRAINING = "draining"  # takes nothing, leaves when empty


@dataclass(frozen=True, slots=True)
class Role:
    """A kind, and the tier's name where it serves or served one."""

    kind: Kind
    tier: str = ""

    def __str__(self) -> str:
        return self.tier if self.kind == Kind.SERVES else f"{self.kind} ({self.tier})" if self.tier else str(self.kind)


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """What roles are decided by."""

    name: str
    slo_requests: tuple[int, ...]  # per position in the tier table, tightest first
    best_effort: int = 0
    load: float = 0.0
    is_reporting: bool = True  # a silent one keeps its role: missing news are no news

    @property
    def tightest(self) -> float:
        """Position of the tightest tier whose requests it carries; inf without any."""
        return next((float(i) for i, count in enumerate(self.slo_requests) if count), float("inf"))

    @property
    def is_empty(self) -> bool:
        return not any(self.slo_requests) and not self.best_effort


class StaticRoles:
    """As many replicas as ``Tier.replicas`` says to each tier, by name; the rest serves every tier."""

    def __init__(self, table: TierTable) -> None:
        self._table = table
        self._assigned: dict[str, int] = {}

    def set_table(self, table: TierTable) -> None:
        self._table = table
        self._assigned = table.assign(list(self._assigned))

    def step(self, views: Sequence[ReplicaView], now_s: float) -> None:
        """Follow the replicas that there are."""
        if self._assigned.keys() != {view.name for view in views}:
            self._assigned = self._table.assign([view.name for view in views])

    def position(self, name: str) -> int:
        return self._assigned.get(name, SHARED)

    def told(self, name: str) -> tuple[str, str]:
        """The tier that it serves; and its role in full, which is the same."""
        position = self.position(name)
        tier = "shared" if position == SHARED else self._table.tiers[position].name
        return tier, tier
