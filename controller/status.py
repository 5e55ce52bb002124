"""The fleet as plain JSON values, for operators and dashboards."""

from typing import Any

import msgspec

from controller.fleet import Fleet
from routing.policy import SHARED


def fleet_status(fleet: Fleet, now_s: float) -> dict[str, Any]:
    """Tiers, replicas, load and attainment."""
    return {
        "version": fleet.tiers.version,
        "routing": fleet.options.routing,
        "tiers": [msgspec.to_builtins(tier) for tier in fleet.tiers.tiers],
        "replicas": [replica_status(fleet, name, now_s) for name in sorted(fleet.replicas)],
        "attainment": fleet.tracker.summary(now_s),
    }


def replica_status(fleet: Fleet, name: str, now_s: float) -> dict[str, Any]:
    """One replica as the controller knows it."""
    replica, tier = fleet.replicas[name], fleet.tier_of(name)
    view = replica.candidate(0, tier)
    return {
        "replica": name,
        "tier": "shared" if tier == SHARED else fleet.tiers.tiers[tier].name,
        "live": replica.is_live(now_s, fleet.options.silent_s),
        "draining": replica.draining,
        "pid": replica.pid,
        "profile": replica.profile.name,
        "requests": view.requests,
        "best_effort": view.best_effort,
        "backlog_tokens": view.backlog_tokens,
        "kv_used_tokens": replica.kv_used_tokens,
        "kv_capacity_tokens": int(replica.limits["kv_capacity_tokens"]),
        "seconds_since_report": round(now_s - replica.seen_s, 3),
        "drift": replica.drift(),
    }
