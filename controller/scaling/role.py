"""A replica's role, what it is decided by, and the roles that never change. Pure."""

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import NamedTuple

from controller.disaggregation.phases import Phase
from controller.scaling.demand import Need
from controller.scaling.history import Change, History
from controller.scaling.tiers import TierTable
from protocol.messages import INF
from routing.fleet_state import SHARED


class Kind(StrEnum):
    """What a replica is there for."""

    SERVES = "serves"  # a tier, and looser ones that have no room
    PENDING = "pending"  # lost the last request of its tier; ends what it carries, takes no SLO request
    POOL = "pool"  # best effort, until a tier needs it
    DRAINING = "draining"  # takes nothing, leaves when empty
    PREFILL = "prefill"  # computes prompts of all tiers, in a disaggregated fleet; the others there decode


class Role(NamedTuple):
    """A kind, and the tier's name where it serves or served one."""

    kind: Kind
    tier: str = ""

    def __str__(self) -> str:
        return self.tier if self.kind == Kind.SERVES else f"{self.kind} ({self.tier})" if self.tier else str(self.kind)


class ReplicaView(NamedTuple):
    """What roles are decided by."""

    name: str
    slo_requests: tuple[int, ...]  # per position in the tier table, tightest first
    best_effort: int = 0
    load: float = 0.0
    is_reporting: bool = True  # a silent one keeps its role: missing news are no news
    phase: Phase | None = None  # in a disaggregated fleet
    is_bound: bool = False  # to its phase, by its group

    @property
    def tightest(self) -> float:
        """Position of the tightest tier whose requests it carries; inf without any."""
        for i, count in enumerate(self.slo_requests):
            if count:
                return float(i)
        return INF

    @property
    def is_empty(self) -> bool:
        return not any(self.slo_requests) and not self.best_effort


class StaticRoles:
    """As many replicas as ``Tier.num_replicas`` says to each tier, by name; the rest serve every tier and may drain."""

    def __init__(self, table: TierTable, history: History | None = None) -> None:
        self.table = table
        self.shares: dict[str, int] = {}  # nobody competes: what is there is shared
        self._history = History() if history is None else history
        self._assigned: dict[str, int] = {}
        self._prefills: set[str] = set()
        self.draining: set[str] = set()
        self.version = 0  # grows with every change of a role or of the table

    def set_table(self, table: TierTable) -> None:
        self.table = table
        self._assign(list(self._assigned))

    def step(self, views: Sequence[ReplicaView], now_s: float) -> None:
        """Follow the replicas that there are, and their phases."""
        prefills = {view.name for view in views if view.phase == Phase.PREFILL}
        if self._assigned.keys() != {view.name for view in views} or prefills != self._prefills:
            self._prefills = prefills
            self._assign([view.name for view in views])
            self.draining &= self._assigned.keys()

    def _assign(self, names: Sequence[str]) -> None:
        """Tiers are of the replicas that decode; prompts of all tiers are computed by the others."""
        assigned = self.table.assign([name for name in names if name not in self._prefills])
        self._assigned = dict.fromkeys(names, SHARED) | assigned
        self.version += 1

    def position(self, name: str) -> int:
        return self._assigned.get(name, SHARED)

    def told(self, name: str) -> tuple[str, str]:
        """The tier that it serves; and its role in full, which is the same."""
        position = self.position(name)
        tier = "shared" if position == SHARED else self.table.tiers[position].name
        return tier, tier

    # -- size -------------------------------------------------------------------------------------------------------

    def role(self, name: str) -> Role:
        serves = Kind.PREFILL if name in self._prefills else Kind.SERVES
        return Role(serves if self.is_open(name) else Kind.DRAINING)

    def is_open(self, name: str) -> bool:
        """Whether it takes anything at all."""
        return name not in self.draining

    def names(self, kind: Kind) -> list[str]:
        """Replicas of a kind, in order of their names."""
        return sorted(name for name in self._assigned if self.role(name).kind == kind)

    def may_leave(self, name: str) -> bool:
        """Whether the fleet can do without it: what a tier has to itself stays."""
        return self.position(name) == SHARED

    def drain(self, name: str, now_s: float, reason: str) -> None:
        """Take nothing more on this replica."""
        if name in self._assigned and self.is_open(name):
            self.draining.add(name)
            self._history.note(Change(now_s, name, self.told(name)[1], str(Kind.DRAINING), reason))

    def restore(self, name: str, views: Iterable[ReplicaView], now_s: float, reason: str) -> bool:
        """Take a draining replica back; whether it is there and was draining."""
        is_there = any(view.name == name and view.is_reporting for view in views)
        if not is_there or self.is_open(name):
            return False
        self.draining.remove(name)
        self._history.note(Change(now_s, name, str(Kind.DRAINING), self.told(name)[1], reason))
        return True

    def replicas_needed(self, needs: Sequence[Need]) -> list[float]:
        """Replicas per tier: its own, and the part of the shared ones that its demand takes beyond those."""
        tiers = self.table.tiers
        return [max(float(tier.num_replicas), need.busy) for tier, need in zip(tiers, needs, strict=True)]


IN_POOL = Role(Kind.POOL)


def has_changed_phase(role: Role, view: ReplicaView) -> bool:
    """Whether a replica that takes requests is in another phase than its role says."""
    return role.kind != Kind.DRAINING and (role.kind == Kind.PREFILL) != (view.phase == Phase.PREFILL)
