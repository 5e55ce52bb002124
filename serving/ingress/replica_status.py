"""The replicas of a status page: as the controller tells of them, and as they were last known where it does not."""

from collections.abc import Mapping, Sequence
from typing import Any

POOLED = ("replicas", "starting")  # lists of all models together

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


def of_several(pages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One page of several models' pages: replicas and starts name their ``model``, the rest is under ``models``.

    ``version`` is the lowest: a tier table is in force once every model has it.
    """
    pooled = {
        key: [{**each, "model": page["model"]} for page in pages for each in page.get(key) or ()] for key in POOLED
    }
    rest = [{key: value for key, value in page.items() if key not in POOLED} for page in pages]
    told: dict[str, Any] = {"models": rest, "version": min(page.get("version") or 0 for page in pages), **pooled}
    if wrong := next((page["tier_table_error"] for page in pages if page.get("tier_table_error")), ""):
        told["tier_table_error"] = wrong
    return told


def pages_of(status: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The page of each model, of a page of several; of any other, the page itself."""
    if "models" not in status:
        return [dict(status)]
    return [
        page | {key: [each for each in status.get(key, ()) if each.get("model") == page["model"]] for key in POOLED}
        for page in status["models"]
    ]
