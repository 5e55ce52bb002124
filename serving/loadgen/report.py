"""A replay's points as tables for people, JSON for programs and parquet for those who want every request."""

import importlib.metadata
import json
import math
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from serving.loadgen.client import Record
from serving.loadgen.mix import SloClass
from serving.loadgen.summary import Outcomes, Point, headline
from serving.tables import table_console


def result_json(config: dict[str, Any], seed: int, points: Sequence[Point]) -> dict[str, Any]:
    """The project's result-file shape."""
    return {
        "name": "replay",
        "version": code_version(),
        "config": config,
        "seeds": [seed],
        "machine": {"cpus": os.cpu_count(), "system": platform.platform(), "python": platform.python_version()},
        "headline": headline(points),
        "points": list(points),
    }


def write_json(path: Path, result: dict[str, Any]) -> None:
    """Write the result file whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
    part.replace(path)


def write_records(path: Path, records: Sequence[Record], asked: Sequence[SloClass], table: Outcomes) -> None:
    """One row per request sent, with the arrival time of every chunk."""
    import pyarrow
    import pyarrow.parquet

    columns: dict[str, Any] = {
        "request": [r.request for r in records],
        "label": [c.label for c in asked],
        **{name: [_bound(getattr(c, name)) for c in asked] for name in ("ttft_ms", "tpot_ms", "e2e_ms")},
        **{name: [getattr(r, name) for r in records] for name in ("due_s", "sent_s", "end_s", "http_status", "detail")},
        "status": [r.status.value for r in records],
        "attained": table.attained,
        "downgraded": table.is_downgraded,
        "output_tokens": table.tokens,
        "ttft_s": table.ttft_s,
        "tpot_s": table.tpot_s,
        "tier": [r.slo.tier if r.slo else None for r in records],
        "replica": [r.slo.replica if r.slo else None for r in records],
        "reason": [r.slo.reason if r.slo else None for r in records],
        "predicted_ttft_ms": [r.slo.predicted_ttft_ms if r.slo else None for r in records],
        "ttft_chance": [r.slo.ttft_chance if r.slo else None for r in records],
        "predicted_tpot_ms": [r.slo.predicted_tpot_ms if r.slo else None for r in records],
        "chunk_s": [r.chunk_s.tolist() for r in records],
        "chunk_tokens": [r.chunk_tokens.tolist() for r in records],
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), path, compression="zstd")


def report(points: Sequence[Point]) -> Group:
    """The tables printed at the end: who got what, how fast, and what the server had foreseen."""
    return Group(_outcome_table(points), _latency_table(points), _prediction_table(points), Text(_closing(points[0])))


def print_report(points: Sequence[Point]) -> None:
    """Print the tables to stdout, whole even where the terminal is narrower than they are."""
    table_console().print(report(points))


def code_version() -> str:
    """Version of the installed distribution."""
    try:
        return importlib.metadata.version("polyslo")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _outcome_table(points: Sequence[Point]) -> Table:
    table = _table("Who got what: refused, downgraded, failed and unfinished requests count as misses")
    headers = (
        "sent",
        "attained",
        "attained\n%",
        "kept\n%",
        "99 % of\ntokens %",
        "mean\nTPOT %",
        "refused",
        "best\neffort",
    )
    for name in (*headers, "errors", "open", "goodput\nper s"):
        table.add_column(name, justify="right", no_wrap=True)
    for point in _ordered(points):
        shares = (
            _percent(point[k]) for k in ("attainment", "kept_share", "attainment_tolerant", "attainment_mean_tpot")
        )
        counts = (str(point[k]) for k in ("refused", "downgraded", "error", "unfinished"))
        attained = str(point["attained"]) if point["with_slo"] else "-"
        goodput = f"{point['goodput_per_s']:.2f}"
        table.add_row(escape(point["label"]), str(point["requests"]), attained, *shares, *counts, goodput)
    return table


def _latency_table(points: Sequence[Point]) -> Table:
    table = _table("Latency in ms, from the time each request was due")
    for side in ("TTFT", "TPOT"):
        for quantile in ("P50", "P95", "P99"):
            table.add_column(f"{side}\n{quantile}", justify="right")
    table.add_column("tokens\nper s", justify="right")
    for point in _ordered(points):
        cells = [_figure(point[side][q]) for side in ("ttft_ms", "tpot_ms") for q in ("p50", "p95", "p99")]
        table.add_row(escape(point["label"]), *cells, f"{point['tokens_per_s']:.1f}")
    return table


def _prediction_table(points: Sequence[Point]) -> Table | Text:
    if not any(point["prediction"][side]["count"] for point in points for side in ("ttft", "tpot")):
        return Text("The server told no predictions.")
    table = _table(
        "Predicted against measured by the server, in ms; bias is predicted - measured, admitted requests only"
    )
    table.add_column("requests", justify="right")
    for side in ("TTFT", "TPOT"):
        for name in ("MAPE %", "bias", "|error| P95"):
            table.add_column(f"{side}\n{name}", justify="right", no_wrap=True)
    for point in _ordered(points):
        ttft, tpot = point["prediction"]["ttft"], point["prediction"]["tpot"]
        cells = [
            c for e in (ttft, tpot) for c in (_figure(e["mape_pct"]), _figure(e["bias_ms"]), _figure(e["abs_p95_ms"]))
        ]
        table.add_row(escape(point["label"]), str(ttft["count"]), *cells)
    return table


def _closing(whole: Point) -> str:
    lag, retry = whole["send_lag_ms"], whole["retry_after_s"]
    lines = [
        f"Sent behind time: P50 {_figure(lag['p50'])} ms, P95 {_figure(lag['p95'])} ms, P99 {_figure(lag['p99'])} ms."
    ]
    if retry["count"]:
        spread = f"{retry['min']:g} to {retry['max']:g} s, mean {retry['mean']:.1f} s"
        lines.append(f"Retry-After on {retry['count']} of {whole['refused']} refusals: {spread}.")
    if whole["reasons"]:
        lines.append("Reasons: " + ", ".join(f"{reason} ({count})" for reason, count in whole["reasons"].items()))
    if whole["estimated_token_times"]:
        lines.append(f"Token times estimated from chunks in {whole['estimated_token_times']} answers.")
    return "\n".join(lines)


def _ordered(points: Sequence[Point]) -> list[Point]:
    """Classes first, the total last; one class needs no total."""
    return [*points[1:], points[0]] if len(points) > 2 else list(points[1:])


def _table(title: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False)
    table.add_column("class", no_wrap=True)
    return table


def _bound(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share * 100.0:.1f}"


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
