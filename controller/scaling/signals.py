"""What the fleet's size is decided by, and what is to be done about it. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from controller.scaling.demand import Hardware, Load
from controller.scaling.role import ReplicaView
from protocol.names import group_of


class ScalingOptions(msgspec.Struct, frozen=True):
    """Bounds and tempers; all times in seconds."""

    min_replicas: int = 1
    max_replicas: int = 1
    group: str = ""  # whose replicas come and go; their names begin with it
    warm_spares: int = 0  # replicas beyond what the demand takes
    target_utilization: float = 0.7  # part of its time that a replica is meant to be busy with SLO requests
    look_back_period_s: float = 30.0  # over which demand is measured
    upscale_delay_s: float = 0.0  # the fleet must have been too small for so long before Serve starts replicas
    upscale_cooldown_s: float = 15.0
    downscale_cooldown_s: float = 30.0
    downscale_delay_s: float = 120.0  # demand must have been lower for so long
    downscale_margin: float = 0.15  # by so much
    manual_hold_s: float = 600.0  # a size set by hand stays for so long
    drain_timeout_s: float = 300.0  # best-effort work on a draining replica moves elsewhere after so long
    start_timeout_s: float = 900.0  # a replica that has not started by then is cancelled, where demand allows it
    configured: int = 0  # replicas that a deploy begins with, of all controllers together; 0: not known
    phases: tuple[str, ...] = ()  # of a disaggregated fleet, that the group's replicas may take
    unattainable: str = "best_effort"  # or "refuse": what tiers do with what they cannot attain, where they do not say

    def is_own(self, replica: str) -> bool:
        """Whether a replica is of the group that comes and goes."""
        return group_of(replica) == self.group


class Serve(NamedTuple):
    """What Serve says of the fleet's size."""

    replicas: int  # that it is asked for at present
    running: int | None = None  # of these, that have started; none: not said
    deployed: float = 0.0  # changes with every deploy of the application
    unplaced: int = 0  # of those that have not started, the ones that no node has had room for yet


@dataclass(frozen=True)
class Signals:
    """What one step is decided by."""

    serve: Serve | None  # none when it does not answer
    views: Sequence[ReplicaView]
    loads: Mapping[str, Load]  # per tier
    waiting_tokens: Mapping[str, float]  # prompt tokens in queue, per tier
    hardware: Hardware | None  # of the group that grows, as last seen; none while none of it has ever reported
    decode_waiting_tokens: Mapping[str, float] = field(default_factory=dict)  # of those that wait for room to decode


@dataclass(frozen=True)
class Actions:
    """What to do now."""

    replicas: int | None = None  # ask Serve for so many
    remove: tuple[str, ...] = ()  # end these drained replicas, then ask Serve for as many less
