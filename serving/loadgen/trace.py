"""Traces: what is asked for and when, from parquet or CSV (or drawn), checked before anything is sent.

A trace holds lengths and arrivals only. Columns: ``arrival_s``, ``input_tokens``, ``output_tokens``; optionally
``app``, ``session_id`` and ``prefix_block_hashes``.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

REQUIRED = ("arrival_s", "input_tokens", "output_tokens")
MAX_TOKENS = 10_000_000  # per request: more than any model's context, so a mistake in the file


class WorkloadError(ValueError):
    """A trace, mix or option that cannot be used; the message names file, column and row."""


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
        """The same trace from time 0, ``rate_scale`` times as fast, lengths times ``length_scale`` (at least 1)."""
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
    table = _read_table(path)
    columns = REQUIRED if poisson_per_s is None else REQUIRED[1:]
    missing = [column for column in columns if column not in table.column_names]
    if missing:
        raise WorkloadError(f"{path}: column {missing[0]!r} is missing (found: {', '.join(table.column_names)})")
    if table.num_rows == 0:
        raise WorkloadError(f"{path}: the trace is empty")
    if poisson_per_s is None:
        arrival_s = _checked_arrivals(path, _numbers(path, table, "arrival_s"))
    else:
        arrival_s = poisson_arrivals_s(table.num_rows, poisson_per_s, seed)
    blocks, block_tokens = _prefix_blocks(path, table)
    return Trace(
        name=path.stem,
        arrival_s=arrival_s,
        input_tokens=_token_counts(path, table, "input_tokens"),
        output_tokens=_token_counts(path, table, "output_tokens"),
        app=_apps(table),
        prefix_blocks=blocks,
        prefix_block_tokens=block_tokens,
    )


def synthetic_trace(
    requests: int, rate_per_s: float, input_tokens: float, output_tokens: float, seed: int = 0, sigma: float = 0.6
) -> Trace:
    """Poisson arrivals with log-normal lengths of the given medians; ``sigma`` is the spread of the logarithm."""
    rng = np.random.default_rng((seed, 1))
    lengths = np.exp(rng.normal(0.0, sigma, (2, requests))) * [[input_tokens], [output_tokens]]
    prompt, output = np.maximum(1, np.rint(lengths)).astype(np.int64)
    return Trace("synthetic", poisson_arrivals_s(requests, rate_per_s, seed), prompt, output, ["synthetic"] * requests)


def poisson_arrivals_s(requests: int, rate_per_s: float, seed: int) -> NDArray[np.float64]:
    """Arrival times of a Poisson process, the first at 0."""
    gaps_s = np.random.default_rng((seed, 0)).exponential(1.0 / rate_per_s, requests)
    return np.asarray(np.cumsum(gaps_s) - gaps_s[0], dtype=np.float64)


def _scaled_tokens(tokens: NDArray[np.int64], scale: float) -> NDArray[np.int64]:
    return np.asarray(np.maximum(1, np.rint(tokens * scale)), dtype=np.int64)


def _read_table(path: Path) -> Any:
    import pyarrow.csv
    import pyarrow.parquet

    if not path.is_file():
        raise WorkloadError(f"{path}: no such trace file")
    is_csv = path.suffix.lower() in (".csv", ".tsv", ".txt")
    try:
        if not is_csv:
            return pyarrow.parquet.read_table(path)
        options = pyarrow.csv.ParseOptions(delimiter="\t" if path.suffix.lower() == ".tsv" else ",")
        return pyarrow.csv.read_csv(path, parse_options=options)
    except (pyarrow.ArrowException, OSError) as error:
        kind = "CSV" if is_csv else "parquet"
        raise WorkloadError(f"{path}: not a readable {kind} file ({_first_line(error)})") from None


def _numbers(path: Path, table: Any, column: str) -> NDArray[np.float64]:
    import pyarrow

    values = table.column(column)
    if not (pyarrow.types.is_integer(values.type) or pyarrow.types.is_floating(values.type)):
        row, value = _first_non_number(values.to_pylist())
        raise WorkloadError(f"{path}: column {column!r} holds {values.type}, not numbers (row {row}: {value!r})")
    numbers: NDArray[np.float64] = values.cast(pyarrow.float64()).to_numpy()  # null becomes NaN
    bad = np.flatnonzero(~np.isfinite(numbers))
    if bad.size:
        hint = "; --poisson RATE draws arrivals instead" if column == "arrival_s" else ""
        raise WorkloadError(f"{path}: column {column!r}, row {bad[0]}: {_shown(numbers[bad[0]])} is not finite{hint}")
    return numbers


def _first_non_number(values: list[Any]) -> tuple[int, Any]:
    for row, value in enumerate(values):
        try:
            float(value)
        except (TypeError, ValueError):
            return row, value
    return 0, values[0] if values else None


def _checked_arrivals(path: Path, arrival_s: NDArray[np.float64]) -> NDArray[np.float64]:
    negative = np.flatnonzero(arrival_s < 0)
    if negative.size:
        row = negative[0]
        raise WorkloadError(f"{path}: column 'arrival_s', row {row}: {_shown(arrival_s[row])} is negative")
    back = np.flatnonzero(np.diff(arrival_s) < 0)
    if back.size:
        row = back[0] + 1
        raise WorkloadError(
            f"{path}: column 'arrival_s', row {row}: {_shown(arrival_s[row])} is before the row above it"
            f" ({_shown(arrival_s[row - 1])}); sort the trace by arrival_s, or draw arrivals with --poisson RATE"
        )
    return arrival_s


def _token_counts(path: Path, table: Any, column: str) -> NDArray[np.int64]:
    numbers = _numbers(path, table, column)
    for is_bad, reason in (
        (numbers < 1, "is less than 1"),
        (numbers != np.floor(numbers), "is not a whole number"),
        (numbers > MAX_TOKENS, f"is more than {MAX_TOKENS}"),
    ):
        bad = np.flatnonzero(is_bad)
        if bad.size:
            raise WorkloadError(f"{path}: column {column!r}, row {bad[0]}: {_shown(numbers[bad[0]])} {reason}")
    return numbers.astype(np.int64)


def _apps(table: Any) -> list[str]:
    if "app" not in table.column_names:
        return [""] * table.num_rows
    return ["" if value is None else str(value) for value in table.column("app").to_pylist()]


def _prefix_blocks(path: Path, table: Any) -> tuple[list[tuple[int, ...]] | None, int]:
    """Block ids per request, made unique over sessions where the source numbers them per session."""
    column = "prefix_block_hashes"
    if column not in table.column_names:
        return None, 0
    told = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
    size = told.get("prefix_block_size_tokens", "512")
    lists = table.column(column).to_pylist()
    if not size.isdigit() or not all(row is None or isinstance(row, list) for row in lists):
        raise WorkloadError(f"{path}: column {column!r} must hold lists of integers (with a block size in metadata)")
    sessions = [0] * len(lists)
    if told.get("prefix_scope") == "session" and "session_id" in table.column_names:
        sessions = table.column("session_id").to_pylist()
    rows = zip(sessions, lists, strict=True)
    return [tuple((session << 32) + block for block in row or ()) for session, row in rows], int(size)


def _shown(value: float) -> str:
    return "null or NaN" if np.isnan(value) else f"{value:g}"


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
