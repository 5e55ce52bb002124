"""Which replica serves which tier: moves between tiers, the pending list and the best-effort pool.

PolyServe sections 4.3 and 4.4: a tier without room takes a replica from the pool at once, one that lost its last
request gives its replica back, and one that is kept busy only by requests of looser tiers puts it on the pending list,
from where the tier of these requests may take it with all it carries. Pure: views of replicas and time are arguments.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from controller.disaggregation.phases import Phase
from controller.scaling.demand import Need
from controller.scaling.history import Change, History
from controller.scaling.role import IN_POOL, Kind, ReplicaView, Role, has_changed_phase
from controller.scaling.tiers import TierTable
from protocol.messages import INF


class RoleOptions(msgspec.Struct, frozen=True):
    """How replicas move."""

    idle_s: float = 5.0  # a replica without a request of its tier for so long leaves the tier


@dataclass
class DynamicRoles:
    """Every replica has exactly one role. Tiers have between ``low`` and ``high`` replicas as far as there are enough.

    Law: a replica comes to serve a tier only if it carries no request of a tighter one. So no request ever finds
    itself among looser ones.
    """

    table: TierTable
    options: RoleOptions = field(default_factory=RoleOptions)
    history: History = field(default_factory=History)
    shares: dict[str, int] = field(default_factory=dict)  # by tier, where they compete for too few replicas
    version: int = 0  # grows with every change of a role or of the table
    draining: set[str] = field(default_factory=set)  # replicas that take nothing
    _roles: dict[str, Role] = field(default_factory=dict)
    _idle_since_s: dict[str, float] = field(default_factory=dict)
    _counts: Counter[Role] = field(default_factory=Counter)  # replicas of each role
    _fits: dict[int, list[str]] = field(default_factory=dict)  # by position, candidates among the views last seen
    _fits_of: tuple[object, ...] = ()  # those views, the shares and the version

    # -- what it tells ----------------------------------------------------------------------------------------------

    def role(self, name: str) -> Role:
        """The role of a replica; of an unknown one, that of the pool."""
        return self._roles.get(name, IN_POOL)

    def position(self, name: str) -> int:
        """Position of the tier whose requests it takes; ``TierTable.pool`` when it takes best effort only."""
        role = self.role(name)
        found = self.table.find(role.tier) if role.kind == Kind.SERVES else None
        return self.table.pool if found is None else found

    def is_open(self, name: str) -> bool:
        """Whether it takes anything at all."""
        return self.role(name).kind != Kind.DRAINING

    def told(self, name: str) -> tuple[str, str]:
        """The tier that it serves, or the kind of its role; and the role in full."""
        role = self.role(name)
        return (role.tier if role.kind == Kind.SERVES else str(role.kind)), str(role)

    def names(self, kind: Kind, tier: str | None = None) -> list[str]:
        """Replicas of a kind (and of a tier), in order of their names."""
        return sorted(n for n, role in self._roles.items() if role.kind == kind and tier in (None, role.tier))

    def count(self, position: int) -> int:
        """Replicas that serve a tier."""
        return self._counts[Role(Kind.SERVES, self.table.tiers[position].name)]

    def _count_of(self, *kinds: Kind) -> int:
        """Replicas of these kinds."""
        return sum(count for role, count in self._counts.items() if role.kind in kinds)

    # -- what changes it --------------------------------------------------------------------------------------------

    def set_table(self, table: TierTable, now_s: float) -> None:
        """Another tier table: replicas of a removed tier join the next tighter one with what they carry."""
        old, self.table = self.table, table
        self.version += 1
        for name, role in list(self._roles.items()):
            position = old.find(role.tier)
            if role.tier and table.find(role.tier) is None and position is not None:
                nearest = table.tiers[table.bin(old.tiers[position].tpot_s)].name
                self._set(name, Role(role.kind, nearest), now_s, f"tier {role.tier} was removed")

    def step(self, views: Sequence[ReplicaView], now_s: float) -> None:
        """Bring roles in line with what replicas carry, which is told by position in ``table``, and with all bounds."""
        self._follow(views, now_s)
        reporting = sorted((v for v in views if v.is_reporting), key=lambda v: (v.load, v.name))
        for view in reporting:
            self._settle(view, now_s)
        self._trim(reporting, now_s)
        self._fill(reporting, now_s)

    def join(self, name: str, position: int, now_s: float) -> None:
        """Take one of the ``candidates`` into the tier."""
        tier = self.table.tiers[position].name
        self._set(name, Role(Kind.SERVES, tier), now_s, f"{tier} has no room")

    def candidates(self, position: int, views: Sequence[ReplicaView]) -> list[str]:
        """The replicas of which one may join the tier at ``position`` when neither it nor a tighter one has room.

        Those from the pending list that carry its requests first, then those from the pool; none where the tier has
        its maximum or the rest is owed to others.
        """
        if not self._count_of(Kind.POOL, Kind.PENDING):
            return []
        seen = views, self.shares, self.version
        if len(self._fits_of) != len(seen) or any(a is not b for a, b in zip(self._fits_of, seen, strict=True)):
            self._fits, self._fits_of = {}, seen
        if position not in self._fits:
            self._fits[position] = self._candidates(position, views)
        return self._fits[position]

    def _candidates(self, position: int, views: Sequence[ReplicaView]) -> list[str]:
        """``candidates``, anew."""
        tier = self.table.tiers[position]
        serving, reporting = self.count(position), [v for v in views if v.is_reporting]
        free = [v for v in reporting if self.role(v.name).kind in (Kind.POOL, Kind.PENDING)]
        owed = sum(self._missing(i) for i in range(self.table.pool) if i != position) + self._pool_low()
        if serving >= tier.high or (serving >= tier.low and len(free) <= owed):
            return []
        if serving >= max(tier.low, self.shares.get(tier.name, serving + 1)):
            return []
        return self._by_fit(position, free)

    def may_leave(self, name: str) -> bool:
        """Whether the fleet can do without it: one of the pool, or of a tier above its minimum."""
        position = self.position(name)
        return position == self.table.pool or self.count(position) > self.table.tiers[position].low

    def replicas_needed(self, needs: Sequence[Need]) -> list[float]:
        """Whole replicas per tier by demand and bounds."""
        tiers = self.table.tiers
        return [float(min(max(need.replicas, tier.low), tier.high)) for need, tier in zip(needs, tiers, strict=True)]

    def drain(self, name: str, now_s: float, reason: str) -> None:
        """Take nothing more on this replica."""
        if name in self._roles:
            self._set(name, Role(Kind.DRAINING), now_s, reason)

    def restore(self, name: str, views: Iterable[ReplicaView], now_s: float, reason: str) -> bool:
        """Take a draining replica back; whether it is there and was draining."""
        view = next((v for v in views if v.name == name and v.is_reporting), None)
        if view is None or self.role(name).kind != Kind.DRAINING:
            return False
        self._set(name, self._natural(view), now_s, reason)
        return True

    # -- the rules --------------------------------------------------------------------------------------------------

    def _set(self, name: str, role: Role, now_s: float, reason: str) -> None:
        before = self._roles.get(name)
        self._idle_since_s.pop(name, None)
        if role != before:
            self._put(name, role)
            self.history.note(Change(now_s, name, str(before) if before else "absent", str(role), reason))

    def _put(self, name: str, role: Role | None) -> Role | None:
        """Write a role down, or strike it out; returns what it was."""
        before = self._roles.pop(name, None)
        self.version += 1
        self.draining.discard(name)
        if before is not None:
            self._counts[before] -= 1
            if not self._counts[before]:
                del self._counts[before]
        if role is not None:
            self._roles[name] = role
            self._counts[role] += 1
            if role.kind == Kind.DRAINING:
                self.draining.add(name)
        return before

    def _natural(self, view: ReplicaView) -> Role:
        """The role by its phase, else by what it carries: the tightest of its tiers, else the pool."""
        if view.phase == Phase.PREFILL:
            return Role(Kind.PREFILL)
        if view.tightest < self.table.pool:
            position = int(view.tightest)
            tier = self.table.tiers[position]
            return Role(Kind.SERVES if self.count(position) < tier.high else Kind.PENDING, tier.name)
        return Role(Kind.POOL)

    def _follow(self, views: Sequence[ReplicaView], now_s: float) -> None:
        """Replicas that came and went."""
        present = {view.name for view in views}
        for name in self._roles.keys() - present:
            self._put(name, None)
            self._idle_since_s.pop(name, None)
        for view in views:
            if view.name not in self._roles:
                self._set(view.name, self._natural(view), now_s, "joined")
            elif has_changed_phase(self.role(view.name), view):  # its phase is in the history already
                self._put(view.name, self._natural(view))
                self._idle_since_s.pop(view.name, None)

    def _settle(self, view: ReplicaView, now_s: float) -> None:
        """Leave the tier without a request of its own; leave the pending list when empty of SLO requests."""
        role, tightest = self.role(view.name), view.tightest
        if role.kind == Kind.PENDING and tightest == INF:
            self._set(view.name, IN_POOL, now_s, "its last SLO request ended")
        if role.kind != Kind.SERVES:
            return
        position = self.position(view.name)
        if tightest <= position:
            self._idle_since_s.pop(view.name, None)
            return
        since_s = self._idle_since_s.setdefault(view.name, now_s)
        if now_s - since_s >= self.options.idle_s and self.count(position) > self.table.tiers[position].low:
            self._release(view, now_s, f"no request of {role.tier} for {self.options.idle_s:g} s")

    def _release(self, view: ReplicaView, now_s: float, reason: str) -> None:
        """Out of its tier: to the pool, or on the pending list while SLO requests run on it."""
        carries = view.tightest < float("inf")
        role = Role(Kind.PENDING, self.role(view.name).tier) if carries else Role(Kind.POOL)
        self._set(view.name, role, now_s, reason)

    def _trim(self, views: Sequence[ReplicaView], now_s: float) -> None:
        """No tier above its maximum: the least loaded replicas go."""
        for position in range(self.table.pool):
            tier = self.table.tiers[position]
            for view in self._serving(position, views) if self.count(position) > tier.high else ():
                if self.count(position) > tier.high:
                    self._release(view, now_s, f"{tier.name} has more than its maximum of {tier.high:g}")

    def _fill(self, views: Sequence[ReplicaView], now_s: float) -> None:
        """Every tier at its minimum, tightest first; what the pool cannot give, tiers above theirs give up."""
        for position in range(self.table.pool):
            while self._missing(position):
                free = [v for v in views if self.role(v.name).kind in (Kind.POOL, Kind.PENDING)]
                chosen = next(iter(self._by_fit(position, free)), None) or self._surplus(position, views)
                if chosen is None:
                    break
                tier = self.table.tiers[position]
                self._set(chosen, Role(Kind.SERVES, tier.name), now_s, f"minimum of {tier.name}: {tier.low}")
        owed = sum(self._missing(position) for position in range(self.table.pool))
        owed -= self._count_of(Kind.PENDING)  # those are on their way
        if owed <= 0:
            return
        for view in (v for p in reversed(range(self.table.pool)) for v in self._serving(p, views)):
            position = self.position(view.name)
            if owed > 0 and position < self.table.pool and self.count(position) > self.table.tiers[position].low:
                self._release(view, now_s, "another tier has less than its minimum")
                owed -= 1

    def _missing(self, position: int) -> int:
        """Replicas that a tier lacks of its minimum."""
        return max(0, self.table.tiers[position].low - self.count(position))

    def _pool_low(self) -> int:
        """Replicas that the best-effort tier keeps."""
        return sum(tier.low for tier in self.table.tiers if tier.best_effort)

    def _serving(self, position: int, views: Sequence[ReplicaView]) -> list[ReplicaView]:
        """The replicas of a tier, in the order of ``views``."""
        own = set(self.names(Kind.SERVES, self.table.tiers[position].name))
        return [view for view in views if view.name in own]

    def _by_fit(self, position: int, free: Iterable[ReplicaView]) -> list[str]:
        """Free replicas that fit a tier, in order: carrying its requests, once its own, most loaded, least used."""
        name = self.table.tiers[position].name

        def rank(view: ReplicaView) -> tuple[bool, bool, float, int, str]:
            was_own = self.role(view.name).tier == name
            return view.tightest != position, not was_own, -view.load, view.best_effort, view.name

        return [view.name for view in sorted((view for view in free if view.tightest >= position), key=rank)]

    def _surplus(self, position: int, views: Sequence[ReplicaView]) -> str | None:
        """The least loaded replica of a tier above its minimum that may change tier with what it carries."""
        for view in views:
            other = self.position(view.name)
            serves = self.role(view.name).kind == Kind.SERVES and other != position
            if serves and view.tightest >= position and self.count(other) > self.table.tiers[other].low:
                return view.name
        return None

    def check_integrity(self) -> None:
        """Every tier that a role names exists; every role is counted, and only serving replicas as idle."""
        for name, role in self._roles.items():
            if role.tier and self.table.find(role.tier) is None:
                raise AssertionError(f"replica {name}: role names the unknown tier {role.tier}")
            if (role.kind == Kind.SERVES) != bool(role.tier) and role.kind != Kind.PENDING:
                raise AssertionError(f"replica {name}: {role.kind} with tier {role.tier!r}")
        if self._counts != Counter(self._roles.values()) or self.draining != set(self.names(Kind.DRAINING)):
            raise AssertionError(f"roles are counted as {dict(self._counts)}, draining {sorted(self.draining)}")
        idle = {name for name in self._idle_since_s if self.role(name).kind != Kind.SERVES}
        if idle:
            raise AssertionError(f"not serving, yet idle in a tier: {sorted(idle)}")
