"""Replicas that demand takes: per tier and, in a disaggregated fleet, per phase. Pure."""

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from controller.disaggregation.phases import Phase
from controller.scaling.demand import after_prefill, attainable_pace, plan_needs, prefill_replicas, with_backlog
from controller.scaling.role import ReplicaView, StaticRoles
from controller.scaling.roles import DynamicRoles
from controller.scaling.signals import Signals
from protocol.names import group_of

Queued = tuple[Mapping[str, float], Mapping[str, float]]  # prompt tokens per tier: before prefill, and before decode


class Needs(NamedTuple):
    """Replicas, of prefill as a fraction; ``tiers`` are of those that decode where phases are apart."""

    tiers: list[float]
    prefill: float = 0.0

    @property
    def by_phase(self) -> dict[Phase, float]:
        """What each phase takes."""
        return {Phase.PREFILL: self.prefill, Phase.DECODE: sum(self.tiers)}

    def prefill_share(self, most: int) -> int:
        """Of so many replicas, which may be too few, those that prefill."""
        wanted, total = math.ceil(self.prefill), self.prefill + sum(self.tiers)
        return max(1, min(wanted, round(most * self.prefill / total) if total else 0))


@dataclass
class Queues:
    """Prompt tokens in queue, by tier, over a window: what is served within it asks for no replica."""

    _seen: deque[tuple[float, Mapping[str, float]]] = field(default_factory=deque)

    def note(self, tokens: Mapping[str, float], window_s: float, now_s: float) -> None:
        """What waits now; what did more than ``window_s`` ago counts no longer."""
        self._seen.append((now_s, tokens))
        while len(self._seen) > 1 and self._seen[0][0] <= now_s - window_s:
            self._seen.popleft()

    def mean(self) -> dict[str, float]:
        """The mean over the window."""
        names = {name for _, queue in self._seen for name in queue}
        return {name: sum(queue.get(name, 0.0) for _, queue in self._seen) / len(self._seen) for name in names}


def needs_of(
    roles: DynamicRoles | StaticRoles,
    signals: Signals,
    queues: Queued,
    target_utilization: float,
    is_apart: bool,
    unattainable: str,
) -> Needs:
    """By demand and the tiers' bounds; ``unattainable`` as of ``plan_needs``."""
    assert signals.hardware is not None
    table, hardware, loads = roles.table, signals.hardware, signals.loads
    prompts, decodes = queues
    if not is_apart:
        whole = plan_needs(table, loads, prompts, hardware, target_utilization, unattainable)
        return Needs(roles.replicas_needed(whole))
    tiers = {tier.name: tier for tier in table.tiers}
    decoding = {
        name: after_prefill(with_backlog(load, decodes.get(name, 0.0), attainable_pace(tiers[name], load, hardware)))
        for name, load in loads.items()
        if name in tiers
    }
    return Needs(
        roles.replicas_needed(plan_needs(table, decoding, {}, hardware, target_utilization, unattainable)),
        prefill_replicas(table, loads, prompts, hardware, target_utilization, unattainable),
    )


def apart_size(needs: Needs, views: Iterable[ReplicaView], group: str, phases: Iterable[str]) -> int:
    """Replicas of both phases: whole ones of each, one at least. What replicas of other groups are bound to, and
    phases that those of the ``group`` do not take, stay as they are."""
    others = [view for view in views if group_of(view.name) != group]
    bound, present = (Counter(view.phase for view in those) for those in ((v for v in others if v.is_bound), others))
    return sum(
        max(math.ceil(need - 1e-9), bound[phase], 1) if phase in phases else present[phase]
        for phase, need in needs.by_phase.items()
    )


def spare_replicas(staying: Iterable[ReplicaView], needs: Mapping[Phase, float]) -> dict[Phase | None, float]:
    """By phase, how many more replicas there are than it needs; -inf where there is only one, which stays."""
    counts = Counter(view.phase for view in staying)
    return {
        phase: -math.inf if phase is not None and count < 2 else count - needs.get(phase, 0.0) if phase else 0.0
        for phase, count in counts.items()
    }
