"""``polyslo status``: the server's own view of tiers and replicas as tables."""

import json
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from serving.ingress.replica_status import pages_of, state_of
from serving.launch.status import describe_start
from serving.tables import table_console


def show(status: dict[str, Any], as_json: bool = False) -> None:
    """Print the status as it is, or as one table each of tiers and replicas under a line about the controller."""
    if as_json:
        print(json.dumps(status, indent=1))
        return
    console = table_console()
    for page in pages_of(status):
        _show_page(page, console)


def _show_page(status: dict[str, Any], console: Console) -> None:
    """The tables of one model."""
    console.print(_controller_line(status))
    for key in ("error", "tier_table_error", "lengths_error"):
        if status.get(key):
            console.print(f"{key}: {status[key]}", style="red", markup=False)
    for alarm in (status.get("drift") or {}).get("alarms", []):
        told = f"{alarm['tier']}: {alarm['figure']} is {alarm['ratio']:.2f} times what was predicted"
        console.print(f"drift of {told}, for {alarm['since_s']:.0f} s", style="yellow", markup=False)
    if lengths := status.get("lengths"):
        console.print(_lengths_line(lengths))
    console.print(_tier_table(status))
    console.print(replica_table(status))
    if status.get("shards"):
        console.print(_shard_table(status["shards"]))
    if programs := status.get("programs"):
        console.print(_program_line(programs))
    for start in status.get("starting") or ():
        console.print(describe_start(start), markup=False)


def _program_line(programs: dict[str, Any]) -> str:
    """Programs with a deadline; on time and kept in percent of those that have ended."""
    counts = ("open", "waiting", "on_time", "late", "failed", "refused")
    facts = [f"{name.replace('_', ' ')} {programs.get(name, 0)}" for name in counts]
    shares = f"on time {percent(programs.get('on_time_share'))} %   kept {percent(programs.get('kept_share'))} %"
    return f"Programs: {'   '.join(facts)}   {shares}   known graphs {programs.get('known_graphs', 0)}"


def _controller_line(status: dict[str, Any]) -> str:
    controller = status.get("controller") or {}
    facts = {
        "model": status.get("model"),
        "tier table": status.get("version"),
        "default tier": status.get("default_tier"),
        "routing": status.get("routing"),
        "controller up s": controller.get("uptime_s"),
        "decisions": controller.get("decisions"),
        "us per decision": controller.get("decision_us_mean"),
    }
    return "   ".join(f"{name} {figure(value)}" for name, value in facts.items())


def _lengths_line(lengths: dict[str, Any]) -> str:
    """Who bounds output lengths, and how well the latest bounds held."""
    facts = {"lengths by": lengths.get("estimator"), "KV room for": lengths.get("kv_room")}
    if lengths.get("version"):
        facts["forest"] = lengths["version"]
    for when in ("arrival", "later"):
        if told := lengths.get(when):
            facts[f"bounds {when} hold %"] = percent(told["coverage"])
            facts["of max_tokens %"] = percent(told["width_vs_max_tokens"])
    return "   ".join(f"{name} {figure(value)}" for name, value in facts.items())


def _tier_table(status: dict[str, Any]) -> Table:
    table = plain_table("Tiers: objectives, who serves them, outcomes so far (and of the last minute)", "tier")
    bounds = ("TTFT\nms", "TPOT\nms", "E2E\nms")
    counts = ("requests", "attained\n%", "kept\n%", "refused", "best\neffort", "errors")
    add_right(table, *bounds, "replicas", *counts, "recent\n%", "TTFT ms\nP50/P95", "TPOT ms\nP50/P95")
    attainment = status.get("attainment") or {}
    for tier in status.get("tiers", []):
        told = attainment.get(tier["name"], {})
        window, is_judged = told.get("window", {}), not tier.get("best_effort")
        replicas = sum(replica.get("tier") == tier["name"] for replica in status.get("replicas", []))
        table.add_row(
            escape(str(tier["name"])),
            first_token(tier),
            *(milliseconds(tier.get(key)) for key in ("tpot_s", "e2e_s")),
            str(replicas) if replicas else "shared",
            figure(told.get("requests", 0)),
            percent(told.get("attainment") if is_judged else None),
            percent(told.get("kept_share")),
            *(figure(told.get(key, 0)) for key in ("refused", "best_effort", "errors")),
            percent(window.get("attainment") if is_judged else None),
            *(_quantiles(window.get(key)) for key in ("ttft_ms", "tpot_ms")),
        )
    return table


def replica_table(status: dict[str, Any]) -> Table:
    """One row per replica."""
    table = plain_table("Replicas: state and load", "replica")
    add_right(
        table, "tier", "state", "requests", "best\neffort", "backlog\ntokens", "KV used\n%", "report\nage s", "profile"
    )
    for replica in status.get("replicas", []):
        capacity = replica.get("kv_capacity_tokens") or 0
        table.add_row(
            escape(str(replica["replica"])),
            figure(replica.get("tier")),
            state_of(replica),
            *(figure(replica.get(key)) for key in ("requests", "best_effort", "backlog_tokens")),
            percent(replica.get("kv_used_tokens", 0) / capacity if capacity else None),
            *(figure(replica.get(key)) for key in ("seconds_since_report", "profile")),
        )
    return table


def _shard_table(shards: list[dict[str, Any]]) -> Table:
    """One row per controller, where there are several."""
    table = plain_table("Controllers: each decides for its part of the replicas", "shard")
    add_right(table, "state", "replicas", "live", "load", "decisions", "us per\ndecision", "up s")
    for shard in shards:
        keys = ("replicas", "live", "load", "decisions", "decision_us_mean", "uptime_s")
        state = "answers" if shard.get("answers") else "silent"
        table.add_row(str(shard["shard"]), state, *(figure(shard.get(key)) for key in keys))
    return table


def plain_table(title: str, first: str) -> Table:
    """A table without a frame, with its first column."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False)
    table.add_column(first, no_wrap=True)
    return table


def add_right(table: Table, *names: str) -> None:
    """Columns of figures."""
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)


def _quantiles(told: dict[str, float] | None) -> str:
    return f"{told['p50']:.1f}/{told['p95']:.1f}" if told else "-"


def milliseconds(seconds: float | None) -> str:
    """Seconds as milliseconds."""
    return "-" if seconds is None else f"{seconds * 1000.0:g}"


def first_token(tier: dict[str, Any]) -> str:
    """A tier's TTFT in milliseconds, or its slowdown over an idle engine."""
    slowdown = tier.get("ttft_slowdown")
    return f"{slowdown:g}x" if slowdown else milliseconds(tier.get("ttft_s"))


def percent(share: float | None) -> str:
    """A share with one decimal."""
    return "-" if share is None else f"{share * 100.0:.1f}"


def figure(value: Any) -> str:
    """A figure or a word; a dash for none."""
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else escape(str(value))
