"""The fleet as plain JSON values, for operators and dashboards."""

from collections import Counter
from typing import Any

import msgspec

from controller.disaggregation.fleet import DisaggregatedFleet
from controller.disaggregation.phases import Phase
from controller.fleet import Fleet
from protocol.messages import INF


def fleet_status(fleet: Fleet, now_s: float, replicas: list[Any] | None = None) -> dict[str, Any]:
    """Tiers, replicas, load and attainment; ``replicas`` as ``replica_status`` told of them, where it was asked."""
    if replicas is None:
        replicas = [replica_status(fleet, name, now_s) for name in sorted(fleet.replicas)]
    return {
        "version": fleet.tiers.version,
        "routing": fleet.options.routing,
        "tiers": [tier_status(fleet, position) for position in range(len(fleet.tiers.tiers))],
        "replicas": replicas,
        "waiting": waiting_per_tier(fleet),
        "best_effort_waiting": len(fleet.unplaced.line),
        "attainment": fleet.tracker.summary(now_s),
        "least_chances": {name: round(chance, 4) for name, chance in sorted(fleet.calibration.chances.items())},
        "margins": {name: round(margin, 4) for name, margin in sorted(fleet.calibration.margins.items())},
        "lengths": fleet.lengths.status(),
        "drift": fleet.tracker.drift.summary(now_s, [tier.name for tier in fleet.tiers.tiers]),
        "allocation": fleet.allocation.status(now_s),
        "prefixes": prefix_status(fleet),
        "programs": fleet.programs.status(now_s),
    }


def tier_status(fleet: Fleet, position: int) -> dict[str, Any]:
    """One row of the tier table, with what is done in force where the row says nothing; best effort has no objective
    that could be unattainable."""
    tier = fleet.tiers.tiers[position]
    told = "" if tier.best_effort else fleet.tiers.unattainable(position, fleet.options.unattainable)
    return {**msgspec.to_builtins(tier), "unattainable": told}


def mean_load(fleet: Fleet, now_s: float) -> float:
    """Load of the replicas that take requests, in the mean; inf where there is none."""
    is_open = fleet.open_slots(now_s)
    return float(fleet.slots.fleet_state.replicas["load"][is_open].mean()) if is_open.any() else INF


def prefix_status(fleet: Fleet) -> dict[str, int] | None:
    """Prompt tokens that were given a place, those of them that it presumably held, and those that promises counted
    on; none without affinity."""
    affinity = fleet.affinity
    if not affinity.weight:
        return None
    counted = dict(hit_tokens=affinity.hit_tokens, certain_tokens=affinity.certain_tokens)
    return {"prompt_tokens": affinity.prompt_tokens, **counted}


def waiting_per_tier(fleet: Fleet) -> dict[str, int]:
    """Pending requests of each tier that has any, with or without a place."""
    pending = Counter(waiting.tier for waiting in fleet.unplaced.waiting.values())
    pending.update(held.tier for held in fleet.held.pending.values())
    return {fleet.tiers.tiers[position].name: count for position, count in sorted(pending.items())}


def replica_status(fleet: Fleet, name: str, now_s: float) -> dict[str, Any]:
    """One replica as the controller knows it."""
    replica = fleet.replicas[name]
    state = replica.state[0]
    tier, role = fleet.allocation.roles.told(name)
    phase = fleet.phases.of(name) if isinstance(fleet, DisaggregatedFleet) else None
    if phase == Phase.PREFILL:
        tier = role = phase
    return {
        "replica": name,
        "tier": tier,
        "role": role,
        "live": replica.is_live(now_s, fleet.options.silent_s),
        "draining": replica.draining or not fleet.allocation.is_open(name),
        "phase": phase,
        "pid": replica.pid,
        "profile": replica.profile.name,
        "requests": int(state["count"]),
        "best_effort": int(state["best_effort"]),
        "backlog_tokens": float(state["backlog_tokens"]),
        "load": round(float(state["load"]), 4),
        "kv_used_tokens": replica.kv_used_tokens,
        "kv_capacity_tokens": int(replica.limits["kv_capacity_tokens"]),
        "planner_failures": replica.planner_failures,
        "engine": msgspec.structs.asdict(replica.counts),
        "seconds_since_report": round(now_s - replica.seen_s, 3),
        "drift": replica.drift(),
        "iteration_spread": replica.iteration_spread(),
        "drafts": int(replica.limits["drafts"]),
        "draft_acceptance": round(float(replica.limits["acceptance"]), 4),
    }
