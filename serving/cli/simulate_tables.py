"""Tables of ``polyslo simulate`` and ``polyslo plan``; "-" where there is nothing to tell."""

from typing import Any

from rich.table import Table


def simulated(name: str, points: list[dict[str, Any]], names: list[str]) -> Table:
    """What came of each run; ``names`` of the classes."""
    table = Table(title=name)
    latency = ("TTFT p50/p95/p99 ms", "TPOT p50/p95/p99 ms")
    worth = ("tok/s", "gain/s", "goodput tok/s")
    for column in ("req/s", "seed", "attained", "kept", "by class", "refused", *latency, *worth):
        table.add_column(column)
    for point in points:
        by_class = ", ".join(f"{label_of(names, tier)} {share:.3f}" for tier, share in point["by_tier"].items())
        latencies = ("/".join(f"{1000 * v:.0f}" for v in point[name].values()) for name in ("ttft_s", "tpot_s"))
        shares = _share(point["attainment"]["dslo"]), _share(point["kept"]), by_class or "-", _share(point["refused"])
        per_s = (point[name] for name in ("output_tokens_per_s", "service_gain_per_s", "goodput_tokens_per_s"))
        run = f"{point['rate_per_s']:g}", str(point["seed"])
        table.add_row(*run, *shares, *(each or "-" for each in latencies), *(f"{value:.0f}" for value in per_s))
    return table


def planned(points: list[dict[str, Any]], target: float) -> Table:
    """How many replicas each profile, class and rate needs."""
    table = Table(
        title=f"replicas for {100 * target:g}% attainment in every class",
        caption="cost of 1,000 attained requests, in the unit of --price; without it, in hours of one replica",
    )
    for column in ("profile", "class", "req/s", "replicas (over seeds)", "attainment", "cost of 1,000"):
        table.add_column(column)
    for p in points:
        count, cost = p["replicas"], p["cost_per_request"]
        seen = f"{count['median']:.0f} ({count['low']:.0f} to {count['high']:.0f})" if count["median"] else "none"
        told = f"{1e3 * cost['median']:.3g}" if cost else "-"
        own = f"{p['class_rate_per_s']:.3g} of " if "class_rate_per_s" in p else ""
        rate = f"{own}{p['rate_per_s']:g}"
        table.add_row(p["profile"], p["class"], rate, seen, _share(p["attainment"]["median"]), told)
    return table


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def label_of(names: list[str], tier: int) -> str:
    """The name of a class; of a scenario that has none of its own, its number."""
    return names[tier] if tier < len(names) else f"tier {tier}"
