"""The tables of ``polyslo tiers`` and ``polyslo fleet``."""

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

from rich.markup import escape
from rich.table import Table

from serving.cli.status import add_right, figure, first_token, milliseconds, percent, plain_table, replica_table
from serving.ingress.replica_status import pages_of
from serving.tables import table_console


def show_tiers(status: dict[str, Any], as_json: bool) -> None:
    """Tiers with their bounds, the replicas that serve them, what is asked and what was attained."""
    pages = pages_of(status)
    if as_json:
        print(json.dumps(_of_models(pages, _told_of_tiers), indent=1))
        return
    for page in pages:
        _name_model(page, pages)
        table_console().print(_tier_table(page, page.get("allocation") or {}))


def _told_of_tiers(status: dict[str, Any]) -> dict[str, Any]:
    allocation = status.get("allocation") or {}
    told = {"version": status.get("version"), "tiers": status.get("tiers"), "demand": allocation.get("demand")}
    return {**told, "size": allocation.get("size")}


def _of_models(pages: list[dict[str, Any]], told: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """What is told of the only model, or of each of several with its name."""
    if len(pages) == 1:
        return told(pages[0])
    return {"models": [{"model": page.get("model"), **told(page)} for page in pages]}


def show_fleet(status: dict[str, Any], history: int, as_json: bool) -> None:
    """The fleet's size, its replicas with their roles, and the latest changes."""
    pages = pages_of(status)
    if as_json:
        told = _of_models(pages, lambda page: {"replicas": page.get("replicas"), **(page.get("allocation") or {})})
        print(json.dumps(told, indent=1))
        return
    for page in pages:
        _name_model(page, pages)
        _show_page(page, history)


def _name_model(page: dict[str, Any], pages: list[dict[str, Any]]) -> None:
    """A line above the tables of each of several models."""
    if len(pages) > 1:
        table_console().print(f"Model {page.get('model')}", markup=False)


def _show_page(status: dict[str, Any], history: int) -> None:
    """The tables of one model."""
    allocation, console = status.get("allocation") or {}, table_console()
    console.print(size_line(status, allocation))
    console.print(replica_table(status))
    if changes := allocation.get("history", [])[:history]:
        console.print(_history_table(changes))


def size_line(status: dict[str, Any], allocation: dict[str, Any]) -> str:
    """One line on how many replicas there are, and why so many."""
    replicas = status.get("replicas", [])
    line = f"{sum(bool(replica.get('live')) for replica in replicas)} of {len(replicas)} replicas live"
    line += f"   roles {allocation.get('roles', 'static')}"
    if prefixes := status.get("prefixes"):
        line += f"   prefix hits {percent(prefixes['hit_tokens'] / max(1, prefixes['prompt_tokens']))} %"
    size = allocation.get("size")
    if not size:
        return f"{line}   size fixed"
    wanted = ", ".join(f"{tier} {count:g}" for tier, count in (size.get("wanted") or {}).items() if count) or "none"
    line += f"   size {figure(size.get('target'))} ({size['min_replicas']} to {size['max_replicas']})   demand {wanted}"
    if missing := size.get("not_started"):
        line += f"   {missing} not started"
        line += f" ({waiting} wait for room on a node)" if (waiting := size.get("without_room")) else ""
    if error := status.get("scaling_error"):
        line += f"   error: {escape(str(error))}"
    return line + (f"   set by hand, stays for {size['held_s']:g} s" if size.get("held_s") else "")


def _tier_table(status: dict[str, Any], allocation: dict[str, Any]) -> Table:
    table = plain_table(f"Tiers, version {status.get('version')}", "tier")
    add_right(
        table,
        *("TTFT\nms", "TPOT\nms", "E2E\nms", "unattainable", "replicas", "min", "max", "wanted"),
        *("requests\n/s", "tokens in\n/s", "tokens out\n/s", "attained\n%", "recent\n%"),
    )
    size, demand = allocation.get("size") or {}, allocation.get("demand") or {}
    serving = Counter(replica.get("tier") for replica in status.get("replicas", []))
    for tier in status.get("tiers", []):
        name = tier["name"]
        exact, asked = tier.get("num_replicas") or 0, demand.get(name, {})
        outcomes = (status.get("attainment") or {}).get(name, {})
        table.add_row(
            escape(str(name)),
            first_token(tier),
            *(milliseconds(tier.get(key)) for key in ("tpot_s", "e2e_s")),
            tier.get("unattainable") or "-",
            str(serving[name]) if serving[name] else "-",
            *(figure(exact or tier.get(key) or None) for key in ("min_replicas", "max_replicas")),
            figure((size.get("wanted") or {}).get(name)),
            *(figure(asked.get(f"{key}_per_s")) for key in ("requests", "prefill_tokens", "decode_tokens")),
            percent(outcomes.get("attainment")),
            percent((outcomes.get("window") or {}).get("attainment")),
        )
    return table


def _history_table(changes: list[dict[str, Any]]) -> Table:
    table = plain_table("Latest changes, newest first", "ago s")
    for name in ("what", "from", "to", "because"):
        table.add_column(name, overflow="fold")
    for change in changes:
        told = (str(change[key]) for key in ("what", "before", "after", "reason"))
        table.add_row(f"{change['age_s']:.1f}", *map(escape, told))
    return table
