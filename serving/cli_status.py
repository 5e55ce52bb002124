"""``polyslo status``: the server's own view of tiers and replicas as tables."""

import json
import math
import urllib.error
import urllib.request
from typing import Any

from rich.console import Console
from rich.table import Table

TIMEOUT_S = 10.0

# Columns in the order in which they are shown, where the server tells them; what else it tells comes after.
TIER_COLUMNS = ("name", "ttft_ms", "tpot_ms", "e2e_ms", "best_effort", "replicas", "running", "waiting", "attainment")
REPLICA_COLUMNS = ("replica", "tier", "state", "running", "waiting", "kv_used_tokens", "kv_capacity_tokens", "load")


def fetch(url: str) -> dict[str, Any]:
    """The status page of the server at ``url``.

    Raises:
        ValueError: when it cannot be reached or does not answer a status page.
    """
    address = f"{url.rstrip('/')}/polyslo/status"
    if not address.startswith(("http://", "https://")):
        raise ValueError(f"--url: must begin with http:// or https://, got {url!r}")
    try:
        with urllib.request.urlopen(address, timeout=TIMEOUT_S) as response:
            told = json.load(response)
    except urllib.error.HTTPError as error:
        raise ValueError(f"--url: {address} answered HTTP {error.code}") from None
    except OSError as error:
        raise ValueError(f"--url: cannot reach {address} ({getattr(error, 'reason', error)})") from None
    except ValueError:
        raise ValueError(f"--url: {address} did not answer JSON") from None
    if not isinstance(told, dict):
        raise ValueError(f"--url: {address} did not answer a status page")
    return told


def show(status: dict[str, Any], as_json: bool = False, console: Console | None = None) -> None:
    """Print the status as it is, or as one table each of tiers and replicas under a line of totals."""
    console = console or Console()
    if as_json:
        console.print_json(data=status)
        return
    totals = {key: value for key, value in status.items() if not isinstance(value, list | dict)}
    console.print("  ".join(f"{key} {_shown(key, value)}" for key, value in totals.items()), highlight=False)
    for title, key, order in (("Tiers", "tiers", TIER_COLUMNS), ("Replicas", "replicas", REPLICA_COLUMNS)):
        rows = [row for row in status.get(key, []) if isinstance(row, dict)]
        console.print(_table(title, rows, order) if rows else f"{title}: none", highlight=False)


def _table(title: str, rows: list[dict[str, Any]], order: tuple[str, ...]) -> Table:
    told = list(dict.fromkeys(key for row in rows for key, value in row.items() if not isinstance(value, list | dict)))
    columns = [key for key in order if key in told] + [key for key in told if key not in order]
    table = Table(title=title, title_justify="left", header_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column.replace("_", " "), justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*(_shown(column, row.get(column)) for column in columns))
    return table


def _shown(key: str, value: Any) -> str:
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        is_share = key.endswith(("attainment", "load", "share"))
        return f"{value * 100.0:.1f} %" if is_share else f"{value:.4g}"
    return str(value)
