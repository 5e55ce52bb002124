"""The fleet's size: what its autoscaler is shown of it, and where what it drains is closed. Pure."""

from collections import Counter

import numpy as np

from controller.disaggregation.phases import Phase
from controller.fleet import Fleet
from controller.scaling.demand import Hardware
from controller.scaling.signals import Actions, Serve
from protocol.names import group_of

SCALE_S = 1.0  # how often the fleet's size is decided about


def plan_size(fleet: Fleet, serve: Serve | None, now_s: float) -> Actions:
    """What to do about the size, by what Serve says of it at present (none: it does not answer)."""
    group = fleet.options.allocation.scaling.group if fleet.options.allocation.scaling else ""
    queues = waiting_tokens(fleet, decodes=False), waiting_tokens(fleet, decodes=True)
    actions = fleet.allocation.scale(serve, fleet.views(now_s), queues, hardware_of(fleet, group, now_s), now_s)
    fleet.allocation.write_roles(fleet.replicas)
    return actions


def waiting_tokens(fleet: Fleet, decodes: bool) -> dict[str, float]:
    """Prompt tokens of pending requests, per tier: of those that wait for room to decode, or of all others."""
    tokens: Counter[str] = Counter()
    for waiting in fleet.unplaced.waiting.values():
        if (waiting.phase == Phase.DECODE) == decodes:
            tokens[fleet.tiers.tiers[waiting.tier].name] += waiting.prompt_tokens
    return {tier: float(count) for tier, count in tokens.items()}


def hardware_of(fleet: Fleet, group: str, now_s: float) -> Hardware | None:
    """A replica of the group, as fast as its live ones in the mean, with the KV cache of one of them; none while there
    is none."""
    live = [replica for replica in fleet.live(now_s) if group_of(replica.name) == group]
    if not live:
        return None
    coefficients = np.mean([replica.pessimistic_coefs for replica in live], axis=0)
    limits = live[0].limits
    bounds = int(limits["kv_capacity_tokens"]), float(limits["max_iteration_s"])
    acceptance = float(np.mean([replica.limits["acceptance"] for replica in live]))
    return Hardware(coefficients, *bounds, int(limits["drafts"]), acceptance)
