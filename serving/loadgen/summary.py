"""What a replay's records amount to: counts, attainment, percentiles, prediction errors; arithmetic only.

Refused, downgraded, failed and unfinished requests are misses of the class they asked for. Latency counts from the
time a request was due.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.attainment import AttainmentFlags, judge_many
from serving.loadgen.client import Record, Status
from serving.loadgen.mix import BEST_EFFORT_TIER, SloClass

UNDECIDED = ("controller_away", "controller_error")  # reasons: served by its objective, and nothing promised
Floats = NDArray[np.float64]
Point = dict[str, Any]


@dataclass(frozen=True)
class Outcomes:
    """The records as columns, one element per request sent."""

    label: NDArray[np.str_]
    status: NDArray[np.str_]
    is_bounded: NDArray[np.bool_]
    is_downgraded: NDArray[np.bool_]
    is_promised: NDArray[np.bool_]
    on_time: AttainmentFlags  # by its tokens alone
    on_time_from_send: NDArray[np.bool_]
    tokens: NDArray[np.int64]
    ttft_s: Floats  # NaN where there was no token
    tpot_s: Floats  # NaN below two tokens
    e2e_s: Floats  # NaN where unfinished
    send_lag_s: Floats
    retry_after_s: Floats

    @property
    def attained(self) -> NDArray[np.bool_]:
        """Every token on time in the class asked for, where something was asked for."""
        return self.on_time.strict & self.is_bounded & ~self.is_downgraded


def outcomes(records: Sequence[Record], asked: Sequence[SloClass]) -> Outcomes:
    """Judge each record against the class it asked for."""
    tokens = np.array([sum(r.chunk_tokens) for r in records], dtype=np.int64)
    due_s, sent_s, end_s = (
        np.array([getattr(r, k) for r in records], dtype=np.float64) for k in ("due_s", "sent_s", "end_s")
    )
    times_s = _token_times_s(records)
    tpot, e2e = (np.array([getattr(c, k) for c in asked]) / 1e3 for k in ("tpot_ms", "e2e_ms"))
    ttft = np.array([_ttft_ms(r, c) for r, c in zip(records, asked, strict=True)]) / 1e3
    finished = np.array([r.status == Status.FINISHED for r in records], dtype=np.bool_)
    first_s, last_s = _edges_s(records)
    return Outcomes(
        label=np.array([c.label for c in asked], dtype=np.str_),
        status=np.array([r.status.value for r in records], dtype=np.str_),
        is_bounded=np.array([c.is_bounded and not c.best_effort for c in asked], dtype=np.bool_),
        is_promised=np.array([_is_promised(r, c) for r, c in zip(records, asked, strict=True)], dtype=np.bool_),
        is_downgraded=np.array([_is_downgraded(r, c) for r, c in zip(records, asked, strict=True)], dtype=np.bool_),
        on_time=judge_many(times_s - np.repeat(due_s, tokens), tokens, ttft, tpot, e2e, finished),
        on_time_from_send=judge_many(times_s - np.repeat(sent_s, tokens), tokens, ttft, tpot, e2e, finished).strict,
        tokens=tokens,
        ttft_s=first_s - due_s,
        tpot_s=np.where(tokens > 1, (last_s - first_s) / np.maximum(tokens - 1, 1), np.nan),
        e2e_s=np.where(finished, end_s - due_s, np.nan),
        send_lag_s=sent_s - due_s,
        retry_after_s=np.array([r.retry_after_s for r in records], dtype=np.float64),
    )


def _ttft_ms(record: Record, asked: SloClass) -> float:
    """The TTFT that a request is judged by; what a slowdown amounts to stands in the verdict alone."""
    if not asked.ttft_slowdown or record.slo is None or record.slo.target_ttft_ms is None:
        return asked.ttft_ms
    return record.slo.target_ttft_ms


def summarize(records: Sequence[Record], asked: Sequence[SloClass], elapsed_s: float) -> list[Point]:
    """One point for all requests (label ``all``), then one per class in order of first use."""
    table = outcomes(records, asked)
    everything = np.ones(len(records), dtype=np.bool_)
    labels = list(dict.fromkeys(c.label for c in asked))
    groups = [("all", everything)] + [(label, table.label == label) for label in labels]
    return [_point(label, table, records, rows, elapsed_s) for label, rows in groups]


def headline(points: Sequence[Point]) -> dict[str, float]:
    """The figures to quote, flat: overall, of the worst class, and per class."""
    whole, classes = points[0], points[1:]
    judged = {p["label"]: p["attainment"] for p in classes if p["attainment"] is not None}
    figures = {
        "requests": whole["requests"],
        "attainment": whole["attainment"],
        "attainment_worst_class": min(judged.values(), default=None),
        "attainment_tolerant": whole["attainment_tolerant"],
        "attainment_mean_tpot": whole["attainment_mean_tpot"],
        "kept_share": whole["kept_share"],
        "goodput_per_s": whole["goodput_per_s"],
        "tokens_per_s": whole["tokens_per_s"],
        "ttft_ms_p50": whole["ttft_ms"]["p50"],
        "ttft_ms_p95": whole["ttft_ms"]["p95"],
        "tpot_ms_p50": whole["tpot_ms"]["p50"],
        "tpot_ms_p95": whole["tpot_ms"]["p95"],
        **{f"attainment_{label}": value for label, value in judged.items()},
    }
    return {name: value for name, value in figures.items() if value is not None}


def _point(label: str, table: Outcomes, records: Sequence[Record], rows: NDArray[np.bool_], elapsed_s: float) -> Point:
    mine = [record for record, is_mine in zip(records, rows, strict=True) if is_mine]
    bounded = rows & table.is_bounded
    count = {status.value: int(np.count_nonzero(rows & (table.status == status.value))) for status in Status}
    served = ~table.is_downgraded
    attained = int(np.count_nonzero(rows & table.attained))
    return {
        "label": label,
        "requests": int(np.count_nonzero(rows)),
        "with_slo": int(np.count_nonzero(bounded)),
        "attained": attained,
        "attainment": _share(table.attained, bounded),
        "promised": int(np.count_nonzero(rows & table.is_promised)),
        "kept_share": _share(table.on_time.strict & table.is_bounded, rows & table.is_promised),
        "attainment_tolerant": _share(table.on_time.tolerant & served, bounded),
        "attainment_mean_tpot": _share(table.on_time.mean & served, bounded),
        "attainment_from_send": _share(table.on_time_from_send & served, bounded),
        **count,
        "downgraded": int(np.count_nonzero(rows & table.is_downgraded)),
        "downgraded_on_time": int(np.count_nonzero(rows & table.is_downgraded & table.on_time.strict)),
        "output_tokens": int(table.tokens[rows].sum()),
        "tokens_per_s": _rate(float(table.tokens[rows].sum()), elapsed_s),
        "goodput_per_s": _rate(attained, elapsed_s),
        "ttft_ms": _percentiles_ms(table.ttft_s[rows]),
        "tpot_ms": _percentiles_ms(table.tpot_s[rows]),
        "e2e_ms": _percentiles_ms(table.e2e_s[rows]),
        "send_lag_ms": _percentiles_ms(table.send_lag_s[rows]),
        "retry_after_s": _spread(table.retry_after_s[rows]),
        "prediction": {side: _prediction_error(mine, side) for side in ("ttft", "tpot")},
        "estimated_token_times": sum(record.is_estimated for record in mine),
        "replicas": dict(Counter(r.slo.replica for r in mine if r.slo and r.slo.replica)),
        "reasons": dict(Counter(_reason(record) for record in mine if _reason(record)).most_common(20)),
    }


def _token_times_s(records: Sequence[Record]) -> Floats:
    chunks = [np.repeat(np.array(r.chunk_s), np.array(r.chunk_tokens, dtype=np.int64)) for r in records]
    return np.concatenate([*chunks, np.empty(0)])


def _edges_s(records: Sequence[Record]) -> tuple[Floats, Floats]:
    first = [r.chunk_s[0] if r.chunk_s else math.nan for r in records]
    last = [r.chunk_s[-1] if r.chunk_s else math.nan for r in records]
    return np.array(first, dtype=np.float64), np.array(last, dtype=np.float64)


def _is_downgraded(record: Record, asked: SloClass) -> bool:
    """Served best effort although an objective was asked for."""
    if asked.best_effort or not asked.is_bounded:
        return False
    if record.slo is not None and record.slo.reason in UNDECIDED:
        return False
    if record.slo is not None and record.slo.admitted is not None:
        return not record.slo.admitted
    return record.service_tier == BEST_EFFORT_TIER


def _is_promised(record: Record, asked: SloClass) -> bool:
    """What the server says its clients may count on, at the end or, of an answer that broke off, at its beginning;
    older ones tell it as admitted with a prediction."""
    slo = record.slo
    if slo is None:
        return asked.is_bounded and record.is_promised
    if slo.promised is not None:
        return asked.is_bounded and slo.promised
    return asked.is_bounded and slo.admitted is True and slo.predicted_ttft_ms is not None


def _reason(record: Record) -> str:
    return record.detail or (record.slo.reason or "" if record.slo else "")


def _share(flags: NDArray[np.bool_], among: NDArray[np.bool_]) -> float | None:
    return float(np.count_nonzero(flags & among) / np.count_nonzero(among)) if among.any() else None


def _rate(amount: float, elapsed_s: float) -> float:
    return amount / elapsed_s if elapsed_s > 0 else 0.0


def _percentiles_ms(values_s: Floats) -> dict[str, float | None]:
    known = values_s[np.isfinite(values_s)] * 1e3
    return {f"p{q}": float(np.percentile(known, q)) if known.size else None for q in (50, 95, 99)}


def _spread(values: Floats) -> dict[str, float | int | None]:
    known = values[np.isfinite(values)]
    low, mean, high = (float(known.min()), float(known.mean()), float(known.max())) if known.size else (None,) * 3
    return {"count": int(known.size), "min": low, "mean": mean, "max": high}


def _prediction_error(records: Sequence[Record], side: str) -> dict[str, float | int | None]:
    """Predicted against measured by the server, over admitted and finished requests that no replica has lost.

    A positive bias is too pessimistic.
    """
    told = [r.slo for r in records if r.slo and r.status == Status.FINISHED]
    echoes = [slo for slo in told if slo.admitted and not slo.resumed]
    pairs = [(getattr(echo, f"predicted_{side}_ms"), getattr(echo, f"{side}_ms")) for echo in echoes]
    known = np.array([pair for pair in pairs if None not in pair and pair[1] > 0], dtype=np.float64).reshape(-1, 2)
    if not len(known):
        return {"count": 0, "mape_pct": None, "bias_ms": None, "abs_p50_ms": None, "abs_p95_ms": None}
    error_ms = known[:, 0] - known[:, 1]
    return {
        "count": len(known),
        "mape_pct": float(np.mean(np.abs(error_ms) / known[:, 1]) * 100.0),
        "bias_ms": float(error_ms.mean()),
        "abs_p50_ms": float(np.percentile(np.abs(error_ms), 50)),
        "abs_p95_ms": float(np.percentile(np.abs(error_ms), 95)),
    }
