"""Traces: what is asked for and when, from parquet, CSV or JSONL, checked before anything is sent.

A trace holds lengths and arrivals only. Columns: ``arrival_s``, ``input_tokens``, ``output_tokens``; optionally
``app``, ``session_id`` and ``prefix_block_hashes``.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simulation.workloads.traces import (
    WorkloadError,
    block_lists,
    block_size_tokens,
    is_scoped,
    numbers,
    read_table,
    sorted_arrivals,
    token_counts,
    trace_name,
)

MOST_TOKENS = 1 << 31  # of a prompt, or of an output
REQUIRED = ("arrival_s", "input_tokens", "output_tokens")


@dataclass(frozen=True)
class Trace:
    """Requests in order of arrival, one array element each."""

    name: str
    arrival_s: NDArray[np.float64]  # from the start of the trace, never decreasing
    input_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    app: list[str]
    prefix_blocks: list[tuple[int, ...]] | None = None  # ids of the prompt's blocks; same id, same content and prefix
    prefix_block_tokens: int = 0

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def span_s(self) -> float:
        """Seconds from the first arrival to the last."""
        return float(self.arrival_s[-1] - self.arrival_s[0]) if len(self) else 0.0

    def head(self, requests: int) -> "Trace":
        """The first ``requests`` of them."""
        blocks = None if self.prefix_blocks is None else self.prefix_blocks[:requests]
        return replace(
            self,
            arrival_s=self.arrival_s[:requests],
            input_tokens=self.input_tokens[:requests],
            output_tokens=self.output_tokens[:requests],
            app=self.app[:requests],
            prefix_blocks=blocks,
        )

    def scaled(self, rate_scale: float = 1.0, length_scale: float = 1.0) -> "Trace":
        """The same trace from time 0, ``rate_scale`` times as fast, lengths times ``length_scale`` (at least 1).

        Raises:
            WorkloadError: a length would be beyond any.
        """
        start_s = self.arrival_s[0] if len(self) else 0.0
        return replace(
            self,
            arrival_s=(self.arrival_s - start_s) / rate_scale,
            input_tokens=_scaled_tokens(self.input_tokens, length_scale),
            output_tokens=_scaled_tokens(self.output_tokens, length_scale),
            prefix_block_tokens=max(1, round(self.prefix_block_tokens * length_scale)),
        )

    def fitted(self, max_model_tokens: int) -> tuple["Trace", int]:
        """The trace with outputs, then prompts, cut to the model's length, and how many requests were cut."""
        output = np.minimum(self.output_tokens, max(1, max_model_tokens // 2))
        prompt = np.minimum(self.input_tokens, np.maximum(1, max_model_tokens - output))
        fits = self.input_tokens + self.output_tokens <= max_model_tokens
        output, prompt = np.where(fits, self.output_tokens, output), np.where(fits, self.input_tokens, prompt)
        return replace(self, input_tokens=prompt, output_tokens=output), int(np.count_nonzero(~fits))


def read_trace(path: Path, poisson_per_s: float | None = None, seed: int = 0) -> Trace:
    """Read and check a trace; ``poisson_per_s`` replaces its arrivals by a Poisson process of that rate.

    Raises:
        WorkloadError: naming the file and, where there is one, the column and the row (from 0).
    """
    table = read_table(path, REQUIRED if poisson_per_s is None else REQUIRED[1:])
    if poisson_per_s is None:
        arrival_s = sorted_arrivals(path, numbers(path, table, "arrival_s"))
    else:
        arrival_s = poisson_arrivals_s(table.num_rows, poisson_per_s, seed)
    blocks, block_tokens = _prefix_blocks(path, table)
    return Trace(
        name=trace_name(path),
        arrival_s=arrival_s,
        input_tokens=token_counts(path, table, "input_tokens"),
        output_tokens=token_counts(path, table, "output_tokens"),
        app=_apps(table),
        prefix_blocks=blocks,
        prefix_block_tokens=block_tokens,
    )


def poisson_arrivals_s(requests: int, rate_per_s: float, seed: int) -> NDArray[np.float64]:
    """Arrival times of a Poisson process, the first at 0."""
    gaps_s = np.random.default_rng((seed, 0)).exponential(1.0 / rate_per_s, requests)
    return np.asarray(np.cumsum(gaps_s) - gaps_s[0], dtype=np.float64)


def _scaled_tokens(tokens: NDArray[np.int64], scale: float) -> NDArray[np.int64]:
    longest = float(tokens.max(initial=1))
    if longest * scale > MOST_TOKENS:
        raise WorkloadError(f"--length-scale: makes {longest:.0f} tokens more than {MOST_TOKENS}, got {scale}")
    return np.asarray(np.maximum(1, np.rint(tokens * scale)), dtype=np.int64)


def _apps(table: Any) -> list[str]:
    if "app" not in table.column_names:
        return [""] * table.num_rows
    return ["" if value is None else str(value) for value in table.column("app").to_pylist()]


def _prefix_blocks(path: Path, table: Any) -> tuple[list[tuple[int, ...]] | None, int]:
    """Block ids per request, made unique over sessions where the source numbers them per session."""
    lists, size = block_lists(path, table), block_size_tokens(path, table)
    if not lists:
        return None, 0
    sessions = table.column("session_id").to_pylist() if is_scoped(table) else [0] * len(lists)
    ids: dict[tuple[Any, int], int] = {}  # hashes may be negative, sessions anything: what counts is which are the same
    found = [
        tuple(ids.setdefault((session, block), len(ids)) for block in hashes)
        for session, hashes in zip(sessions, lists, strict=True)
    ]
    return found, size
