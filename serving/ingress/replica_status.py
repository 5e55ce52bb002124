"""The replicas of a status page: as the controller tells of them, and as they were last known where it does not."""

from typing import Any

Replica = dict[str, Any]  # as ``controller.status`` describes one


def with_stale(told: list[Replica], last: list[Replica], heard: set[str]) -> list[Replica]:
    """``told``, then those that only ``last`` has, marked ``stale``: they live if they are ``heard``."""
    names = {replica["replica"] for replica in told}
    others = (replica for replica in last if replica["replica"] not in names)
    return [*told, *({**other, "live": other["replica"] in heard, "stale": True} for other in others)]


def state_of(replica: Replica) -> str:
    """In one word how a replica is: draining, silent, stale (only an ingress hears it) or live."""
    if replica.get("draining"):
        return "draining"
    if not replica.get("live"):
        return "silent"
    return "stale" if replica.get("stale") else "live"
