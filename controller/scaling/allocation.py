"""Which replica serves which tier, and how many there are: roles, demand, size and history behind one object. Pure."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from controller.disaggregation.phases import Phase
from controller.mirror.replica_model import VirtualReplica
from controller.scaling.autoscaler import Autoscaler
from controller.scaling.demand import Demand, Hardware
from controller.scaling.history import Change, History
from controller.scaling.needs import Queued
from controller.scaling.role import Kind, ReplicaView, StaticRoles
from controller.scaling.roles import DynamicRoles, RoleOptions
from controller.scaling.signals import Actions, ScalingOptions, Serve, Signals
from controller.scaling.tiers import Tier, TierTable
from controller.shards.share import WHOLE, Share
from routing.fleet_state import RESERVED, SHARED

REBORN = "died and started again"  # reason of a change
FEW, JOIN_S = 16, 0.02  # in a fleet of more replicas, those that join within so long get their roles together


class AllocationOptions(msgspec.Struct, frozen=True):
    """From the configuration."""

    roles: str = "auto"  # "static", "dynamic", or dynamic where a tier bounds its replicas
    idle_s: float = 5.0
    interval_s: float = 0.25  # roles are brought in line that often
    scaling: ScalingOptions | None = None  # none: the size is fixed


class Allocation:
    """Asked by the fleet for each replica's tier; told what arrives, what replicas carry, and the tier table."""

    def __init__(
        self, options: AllocationOptions, table: TierTable, history: History | None = None, share: Share = WHOLE
    ) -> None:
        """``share``: of all bounds, which other controllers have the rest of."""
        self.options, self.share, self._whole_table = options, share, table
        self.table = table = share.of_table(table)
        self.history = History() if history is None else history
        self.demand = Demand(options.scaling.look_back_period_s if options.scaling else Demand.look_back_period_s)
        self.roles: StaticRoles | DynamicRoles = self._make_roles(table)
        self.autoscaler: Autoscaler | None = None
        self._step_s = float("-inf")
        self._views: Sequence[ReplicaView] = ()  # of the last step
        self._seen: tuple[object, int] = (None, 0)  # roles, and their version
        self._hardware: Hardware | None = None  # of the group that grows, as last seen
        if (scaling := share.of_scaling(options.scaling)) is not None:
            self.autoscaler = Autoscaler(scaling, self.roles, self.history, share.is_whole)

    @property
    def is_dynamic(self) -> bool:
        return isinstance(self.roles, DynamicRoles)

    def _make_roles(self, table: TierTable) -> StaticRoles | DynamicRoles:
        wanted = self.options.roles
        if wanted == "auto":
            wanted = "dynamic" if self._whole_table.asks_for_roles else "static"  # in each shard alike
        if wanted == "static":
            return StaticRoles(table, self.history)
        return DynamicRoles(table, RoleOptions(self.options.idle_s), self.history)

    def _keep_roles(self, before: StaticRoles | DynamicRoles, now_s: float) -> None:
        """Under new options: replicas stay in their tiers where roles are dynamic as before, unless one drains that no
        autoscaler would end or take back."""
        is_own = self.autoscaler.options.is_own if self.autoscaler is not None else lambda _name: False
        if not (isinstance(before, DynamicRoles) and isinstance(self.roles, DynamicRoles)):
            return
        if not all(map(is_own, before.draining)):
            return
        before.options, before.shares = self.roles.options, {}
        before.set_table(self.table, now_s)
        self.roles = before
        if self.autoscaler is not None:
            self.autoscaler.roles = before

    def _take_over(self, before: StaticRoles | DynamicRoles, scaler: Autoscaler | None, now_s: float) -> None:
        """Under new roles or options: what drains goes on draining where an autoscaler will end it or take it back, and
        the size is what it was, unless the configured one has changed."""
        if self.autoscaler is not None and before.draining and before is not self.roles:
            own = set(filter(self.autoscaler.options.is_own, before.draining))
            unread = [v._replace(slo_requests=(), is_reporting=False) for v in self._views if v.name in own]
            self.roles.step(unread, now_s)  # only to know them: the views' tiers are those of the table before
            for name in sorted(own):
                self.roles.drain(name, now_s, "was draining")
        if self.autoscaler is not None and scaler is not None:
            options = self.autoscaler.options
            self.autoscaler = replace(scaler, options=options, roles=self.roles)
            if options.configured != scaler.options.configured:
                self.autoscaler.options_came()

    # -- what it is told --------------------------------------------------------------------------------------------

    def set_table(self, table: TierTable, now_s: float) -> None:
        """Another tier table, in place; the next ``step`` moves replicas where it wants them."""
        self._whole_table, table = table, self.share.of_table(table)
        before, self.table = self.table, table
        for change in table_changes(before, table, now_s):
            self.history.note(change)
        made = self._make_roles(table)
        if type(made) is not type(self.roles):
            roles, self.roles = self.roles, made
            self._take_over(roles, self.autoscaler, now_s)
        elif isinstance(self.roles, DynamicRoles):
            self.roles.set_table(table, now_s)
        else:
            self.roles.set_table(table)
        self._step_s = float("-inf")

    def set_share(self, share: Share, now_s: float) -> bool:
        """Another share of all bounds, because controllers came or went; whether it is another one."""
        if share == self.share:
            return False
        self.share = share
        self.set_table(self._whole_table, now_s)
        if self.autoscaler is not None and (scaling := share.of_scaling(self.options.scaling)):
            self.autoscaler.options, self.autoscaler.undoes_resets = scaling, share.is_whole
        return True

    def under(self, options: AllocationOptions, table: TierTable, now_s: float) -> "Allocation":
        """The same under other options: what they do not concern stays."""
        if options == self.options:
            self.set_table(table, now_s)
            return self
        made = Allocation(options, table, self.history, self.share)
        self.demand.look_back(made.demand.look_back_period_s, now_s)
        made.demand, made._hardware, made._views = self.demand, self._hardware, self._views
        made._keep_roles(self.roles, now_s)
        made._take_over(self.roles, self.autoscaler, now_s)
        return made

    def note_gone(self, replica: VirtualReplica, reason: str, now_s: float) -> None:
        """A replica is there no longer, or is back under its name with nothing of what it held. Where nobody gives a
        reason, it fell silent."""
        name, role = replica.name, self.roles.told(replica.name)[1]
        is_expected = replica.draining or not self.roles.is_open(name)
        told = reason or ("left" if is_expected else "stopped reporting")
        self.history.note(Change(now_s, name, role, role if reason == REBORN else "absent", told))

    def record_arrival(self, row: np.ndarray, now_s: float) -> None:
        """A request (REQUEST[]) asks for a place."""
        tier = self.table.tiers[int(row["tier"])].name if self.table.tiers else ""
        self.demand.note(int(row["id"]), tier, int(row["prompt_tokens"]), int(row["output_tokens"]), now_s)

    def is_due(self, now_s: float, has_joined: bool, replicas: int) -> bool:
        """Whether what replicas carry can matter, and ``step`` has not been told for its interval; or one has joined.

        Of many that join at a time, as after a restart of the controller, several share a step.
        """
        since_s = now_s - self._step_s
        return (self.is_dynamic and since_s >= self.options.interval_s) or (
            has_joined and (replicas <= FEW or since_s >= JOIN_S)
        )

    def step(self, views: Sequence[ReplicaView], now_s: float) -> None:
        """Bring roles in line with what the replicas carry."""
        self._step_s, self._views = now_s, views
        self.roles.step(views, now_s)

    def scale(
        self,
        serve: Serve | None,
        views: Sequence[ReplicaView],
        queues: Queued,
        hardware: Hardware | None,
        now_s: float,
    ) -> Actions:
        """What to do about the fleet's size; ``serve`` is what Serve says of it at present, ``hardware`` a replica
        of the group that grows: the last one seen counts while there is none."""
        if self.autoscaler is None:
            return Actions()
        self._hardware = self._hardware if hardware is None else hardware
        signals = Signals(serve, views, self.demand.loads(now_s), queues[0], self._hardware, queues[1])
        return self.autoscaler.step(signals, now_s)

    def on_removed(self, name: str, now_s: float) -> None:
        """A drained replica has been ended."""
        if self.autoscaler is not None:
            self.autoscaler.on_removed(name, now_s)

    # -- what it tells ----------------------------------------------------------------------------------------------

    def candidates(self, position: int) -> list[str]:
        """Of which replicas one may join a tier without room, by the last ``step``, in order; empty where none may."""
        return self.roles.candidates(position, self._views) if isinstance(self.roles, DynamicRoles) else []

    def join(self, name: str, position: int, now_s: float) -> None:
        """Take one of the ``candidates`` into the tier."""
        assert isinstance(self.roles, DynamicRoles)
        self.roles.join(name, position, now_s)

    def write_roles(self, replicas: Mapping[str, VirtualReplica], anew: bool = False) -> None:
        """Put the roles in force where placement reads them, where one or the table has changed since this was asked
        last (``anew``: in any case)."""
        before, self._seen = self._seen, (self.roles, self.roles.version)
        if self._seen != before or anew:
            for name, replica in replicas.items():
                replica.state["tier"] = self.tier(name)

    def tier(self, name: str) -> int:
        """What placement reads: the position of a replica's tier, ``SHARED``, or ``RESERVED`` for best effort only."""
        if self.roles.role(name).kind == Kind.PREFILL:
            return SHARED
        position = self.roles.position(name)
        return RESERVED if self.is_dynamic and position == self.table.pool else position

    @property
    def phase_needs(self) -> Mapping[Phase, float]:
        """Replicas that demand takes of each phase, as fractions; empty where the size does not follow it."""
        return {} if self.autoscaler is None else self.autoscaler.phase_needs

    @property
    def draining(self) -> Collection[str]:
        """Replicas that take nothing at all."""
        return self.roles.draining

    def is_open(self, name: str) -> bool:
        """Whether a replica takes anything at all."""
        return self.roles.is_open(name)

    def status(self, now_s: float) -> dict[str, Any]:
        """As JSON values."""
        size = None
        if self.autoscaler is not None:
            scaler, scaling = self.autoscaler, self.autoscaler.options
            size = {
                "target": scaler.target,
                "min_replicas": scaling.min_replicas,
                "max_replicas": scaling.max_replicas,
                "wanted": scaler.wanted,
                "phases": {phase: round(need, 2) for phase, need in scaler.phase_needs.items()},
                "shares": self.autoscaler.roles.shares,
                "not_started": scaler.missing.count,
                "without_room": scaler.missing.without_room,
                "held_s": round(max(0.0, scaler.held_until_s - now_s), 1),
            }
        demand = {tier: msgspec.to_builtins(load._asdict()) for tier, load in self.demand.loads(now_s).items()}
        return {
            "roles": "dynamic" if self.is_dynamic else "static",
            "size": size,
            "demand": demand,
            "history": self.history.to_builtins(now_s),
        }


def table_changes(before: TierTable, after: TierTable, now_s: float) -> list[Change]:
    """What differs between two tier tables, tier by tier."""
    old, new = ({tier.name: tier for tier in table.tiers} for table in (before, after))
    reason = f"tier table version {after.version}"
    changes = [Change(now_s, f"tier {name}", told(old[name]), "removed", reason) for name in old.keys() - new.keys()]
    for name, tier in new.items():
        if name not in old:
            changes.append(Change(now_s, f"tier {name}", "absent", told(tier), reason))
        elif old[name] != tier:
            changes.append(Change(now_s, f"tier {name}", told(old[name]), told(tier), reason))
    return changes


def told(tier: Tier) -> str:
    """A tier's figures in one line."""
    figures = [f"{key} {value:g}" for key in ("ttft_s", "tpot_s", "e2e_s") if (value := getattr(tier, key)) < 1e300]
    figures += [f"ttft_slowdown {tier.ttft_slowdown:g}"] if tier.ttft_slowdown else []
    return ", ".join([*figures, f"replicas {tier.low} to {tier.high:g}"])
