"""The pages of several shards as one page. Pure.

Replicas, counts, alarms and errors of all shards are pooled; what is learnt or set once for all, such as the tier
table, is as the leader tells it, or the first shard that can tell it where the leader cannot.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from controller.scaling.history import KEPT

Page = Mapping[str, Any]

OWN = (
    "incarnation",
    "code",
    "pid",
    "uptime_s",
    "decisions",
    "given_up",
    "decision_us_mean",
)  # of a shard, as it tells them
SUMMED = ("requests", "met", "refused", "best_effort", "errors", "abandoned", "promised", "kept")
SHARES = {"attainment": ("met", "requests"), "kept_share": ("kept", "promised")}
ERRORS = "scaling_error", "lengths_error"
SIZES = ("target", "min_replicas", "max_replicas", "not_started", "without_room")


def merged_status(pages: Mapping[int, Page | None], loads: Mapping[int, float]) -> dict[str, Any]:
    """One page of those of the shards, by number.

    Args:
        pages: as ``controller.status`` made them; none for a shard that does not answer. One of them does.
        loads: as shards told last; inf or absent: not known, or without a replica.
    """
    told = [page for _, page in sorted(pages.items()) if page is not None]
    first = next((page for page in told if page.get("tiers")), told[0])  # a leader that was reborn knows nothing yet
    merged = {**first, "controller": told[0].get("controller")}
    merged["replicas"] = _replicas(told)
    merged["starting"] = _all(told, "starting")
    merged["waiting"] = _sums(page.get("waiting") or {} for page in told)
    merged["best_effort_waiting"] = sum(page.get("best_effort_waiting") or 0 for page in told)
    merged["attainment"] = merged_attainment([page.get("attainment") or {} for page in told])
    if allocations := _known(told, "allocation"):
        merged["allocation"] = merged_allocation(allocations)
    if programs := _known(told, "programs"):
        merged["programs"] = merged_programs(programs)
    if prefixes := _known(told, "prefixes"):
        merged["prefixes"] = _sums(prefixes)
    if drifts := _known(told, "drift"):
        merged["drift"] = {**drifts[0], "alarms": _alarms(drifts)}
    merged |= {key: errors[0] for key in ERRORS if (errors := _known(told, key))}
    if checkpoints := _known(told, "checkpoints"):
        failed = [each["error"] for each in checkpoints if each.get("error")]
        told_of = {"problems": _all(checkpoints, "problems"), "error": failed[0] if failed else ""}
        merged["checkpoints"] = {**(merged.get("checkpoints") or checkpoints[0]), **told_of}
    merged["shards"] = [_shard(number, page, loads.get(number)) for number, page in sorted(pages.items())]
    return merged


def _replicas(told: Sequence[Page]) -> list[Any]:
    """All replicas by name; one that has left a shard which was blocked is as the shard knows it that heard it last."""
    latest = sorted(_all(told, "replicas"), key=lambda replica: -float(replica["seconds_since_report"]))
    return [replica for _, replica in sorted({str(replica["replica"]): replica for replica in latest}.items())]


def _shard(number: int, page: Page | None, load: float | None) -> dict[str, Any]:
    """A line about one shard."""
    if page is None:
        return {"shard": number, "answers": False}
    own, replicas = page.get("controller") or {}, page.get("replicas") or []
    return {
        "shard": number,
        "answers": True,
        **{key: own.get(key) for key in OWN},
        "replicas": len(replicas),
        "live": sum(bool(replica.get("live")) for replica in replicas),
        "load": load if load is not None and math.isfinite(load) else None,
    }


def merged_attainment(told: Sequence[Mapping[str, Page]]) -> dict[str, dict[str, Any]]:
    """Per tier: counts summed, and shares of these sums.

    Of the window, requests are summed and shares weighted with them; its quantiles are those of the shard that had
    most requests in it, because quantiles of parts do not make one of the whole.
    """
    return {tier: _tier([page[tier] for page in told if tier in page]) for tier in sorted(set(chain(*told)))}


def _tier(counts: Sequence[Page]) -> dict[str, Any]:
    sums = {key: sum(each[key] for each in counts) for key in SUMMED}
    shares = {key: sums[part] / sums[whole] if sums[whole] else None for key, (part, whole) in SHARES.items()}
    windows = [each["window"] for each in counts]
    busiest = max(windows, key=lambda window: window["requests"])
    window = {**busiest, "requests": sum(each["requests"] for each in windows)}
    window |= {key: _weighted([(each[key], each["requests"]) for each in windows]) for key in SHARES}
    return {**counts[0], **sums, **shares, "window": window}


def _weighted(shares: Sequence[tuple[float | None, float]]) -> float | None:
    """The mean of what there is."""
    known = [(share, weight) for share, weight in shares if share is not None and weight > 0]
    return sum(share * weight for share, weight in known) / sum(weight for _, weight in known) if known else None


def merged_allocation(told: Sequence[Page]) -> dict[str, Any]:
    """Demand and sizes summed, changes of all in order of their ages; roles as the first tells them."""
    tiers = sorted({tier for page in told for tier in page["demand"]})
    demand = {tier: _sums(page["demand"][tier] for page in told if tier in page["demand"]) for tier in tiers}
    history = sorted(chain(*(page["history"] for page in told)), key=lambda change: float(change["age_s"]))[:KEPT]
    sizes = _known(told, "size")
    return {**told[0], "size": _size(sizes) if sizes else None, "demand": demand, "history": history}


def merged_programs(told: Sequence[Page]) -> dict[str, Any]:
    """Counts summed, and shares of these sums: a program with a deadline is one shard's."""
    sums = _sums({key: count for key, count in each.items() if not key.endswith("_share")} for each in told)
    ended, promised = sums["on_time"] + sums["late"], sums["promised"]
    shares = {"on_time_share": sums["on_time"] / ended if ended else None}
    return {**sums, **shares, "kept_share": sums["kept"] / promised if promised else None}


def _alarms(drifts: Sequence[Page]) -> list[Any]:
    """Those of all, of one figure of one tier the eldest."""
    alarms = sorted(_all(drifts, "alarms"), key=lambda alarm: float(alarm["since_s"]))
    return [alarm for _, alarm in sorted({(alarm["tier"], alarm["figure"]): alarm for alarm in alarms}.items())]


def _size(sizes: Sequence[Page]) -> dict[str, Any]:
    """Replicas summed, also those wanted per tier; a figure that no shard tells stays untold."""
    merged = dict(sizes[0])
    for key in SIZES:
        known = [size[key] for size in sizes if size.get(key) is not None]
        merged[key] = sum(known) if known else None
    merged["wanted"] = _sums(size.get("wanted") or {} for size in sizes)
    return merged


def _sums(counts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Figures of the same name summed."""
    sums = dict[str, float]()
    for key, count in chain(*(each.items() for each in counts)):
        sums[key] = sums.get(key, 0) + count
    return sums


def _known(told: Sequence[Page], key: str) -> list[Any]:
    """What the shards tell that tell anything."""
    return [page[key] for page in told if page.get(key)]


def _all(pages: Iterable[Page], key: str) -> list[Any]:
    return [each for page in pages for each in page.get(key) or ()]
