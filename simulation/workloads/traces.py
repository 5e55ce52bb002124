"""Traces as arrays: any parquet of the common schema (arrival_s, input_tokens, output_tokens, ...)."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

REQUIRED = ("input_tokens", "output_tokens")
TOP = 1 << 63
FORMATS = {".csv": "CSV", ".tsv": "CSV", ".txt": "CSV", ".jsonl": "JSONL"}  # others are parquet
COMPRESSED = (".gz", ".bz2", ".zst", ".lz4")  # Arrow decompresses CSV and JSONL that are called so
MAX_TOKENS = 10_000_000  # per request: more than any model's context, so a mistake in the file


class WorkloadError(ValueError):
    """A trace, mix or option that cannot be used; the message names file, column and row."""


@dataclass(frozen=True)
class Trace:
    """Columns of a trace, one element per request; ``blocks[first[i] : first[i] + count[i]]`` are its prefix blocks."""

    name: str
    arrival_s: np.ndarray  # empty where the source has no arrivals
    input_tokens: np.ndarray
    output_tokens: np.ndarray
    app: np.ndarray
    session: np.ndarray
    blocks: np.ndarray  # ids counted from 0 over the whole trace
    first_block: np.ndarray
    block_count: np.ndarray
    block_tokens: int


def read_trace(path: Path) -> Trace:
    """Read a trace; raises ``WorkloadError`` naming the file, the column and the row.

    Arrivals may be missing, and need not be sorted where sessions are. Requests recorded without output count as
    cut off at their first token.
    """
    table = read_table(path, REQUIRED)
    columns = {name: table.column(name) for name in table.column_names}
    arrival_s = np.zeros(0)
    if "arrival_s" in columns and columns["arrival_s"].null_count == 0:
        arrival_s = numbers(path, table, "arrival_s")
        arrival_s = arrival_s if "session_id" in columns else sorted_arrivals(path, arrival_s)
    inputs = token_counts(path, table, "input_tokens")
    outputs = np.maximum(1, token_counts(path, table, "output_tokens", least=0))
    rows: int = table.num_rows
    app = np.array(columns["app"].to_pylist()) if "app" in columns else np.full(rows, "")
    session = _session_numbers(columns["session_id"]) if "session_id" in columns else np.arange(rows)
    scope = session if is_scoped(table) else np.zeros(rows, dtype=np.int64)
    blocks = _blocks(block_lists(path, table), scope)
    return Trace(trace_name(path), arrival_s, inputs, outputs, app, session, *blocks, block_size_tokens(path, table))


def _session_numbers(column: Any) -> np.ndarray:
    """Sessions as integers, whatever a source calls them by."""
    import pyarrow

    if pyarrow.types.is_integer(column.type) and not column.null_count:
        return np.asarray(column.to_numpy())
    numbers = dict[Any, int]()
    return np.array([numbers.setdefault(each, len(numbers)) for each in column.to_pylist()])


def block_size_tokens(path: Path, table: Any) -> int:
    """Tokens of a block of ``prefix_block_hashes``."""
    told = (table.schema.metadata or {}).get(b"prefix_block_size_tokens", b"512").decode(errors="replace")
    if not told.isdecimal() or int(told) < 1:
        raise WorkloadError(f"{path}: prefix_block_size_tokens in its metadata must be a number from 1, got {told!r}")
    return int(told)


def is_scoped(table: Any) -> bool:
    """Whether equal hashes mean equal blocks within a session only."""
    return (table.schema.metadata or {}).get(b"prefix_scope") == b"session" and "session_id" in table.column_names


def block_lists(path: Path, table: Any) -> list[list[int]]:
    """``prefix_block_hashes`` of each request; empty where the trace has none."""
    column = "prefix_block_hashes"
    if column not in table.column_names:
        return []
    lists = table.column(column).to_pylist()
    for row, hashes in enumerate(lists):
        if hashes is not None and not (isinstance(hashes, list) and all(isinstance(each, int) for each in hashes)):
            raise WorkloadError(f"{path}: column {column!r}, row {row}: must hold a list of integers, got {hashes!r}")
    return [hashes or [] for hashes in lists]


def _blocks(lists: list[list[int]], scope: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Block ids one after the other, where each request's begin, and how many it has; equal ids in one scope only."""
    none = np.zeros(len(scope), dtype=np.int64)
    if not lists:
        return np.zeros(0, dtype=np.int64), none, none
    count = np.array([len(hashes) for hashes in lists])
    signed = ((each + TOP) % (2 * TOP) - TOP for hashes in lists for each in hashes)  # others may count from 0 to 2**64
    flat = np.fromiter(signed, dtype=np.int64, count=count.sum())
    owner = np.repeat(scope, count)
    _ids, dense = np.unique(np.stack((owner, flat)), axis=1, return_inverse=True)
    return dense.reshape(-1).astype(np.int64), np.cumsum(count) - count, count


def trace_name(path: Path) -> str:
    """A trace's name: that of its file without what tells its format."""
    return _uncompressed(path).stem


def _uncompressed(path: Path) -> Path:
    return path.with_suffix("") if path.suffix in COMPRESSED else path


def read_table(path: Path, columns: Sequence[str]) -> Any:
    """A file as an Arrow table with at least these columns and one row; its name says what it is (``FORMATS``)."""
    import pyarrow.csv
    import pyarrow.json
    import pyarrow.parquet

    if not path.is_file():
        raise WorkloadError(f"{path}: no such trace file")
    suffix = _uncompressed(path).suffix.lower()
    kind = FORMATS.get(suffix, "parquet")
    try:
        if kind == "CSV":
            options = pyarrow.csv.ParseOptions(delimiter="\t" if suffix == ".tsv" else ",")
            table = pyarrow.csv.read_csv(path, parse_options=options)
        elif kind == "JSONL":
            table = pyarrow.json.read_json(path)
        else:
            table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise WorkloadError(f"{path}: not a readable {kind} file ({_first_line(error)})") from None
    missing = [column for column in columns if column not in table.column_names]
    if missing:
        raise WorkloadError(f"{path}: column {missing[0]!r} is missing (found: {', '.join(table.column_names)})")
    twice = [column for column in table.column_names if table.column_names.count(column) > 1]
    if twice:
        raise WorkloadError(f"{path}: column {twice[0]!r} is there twice")
    if table.num_rows == 0:
        raise WorkloadError(f"{path}: the trace is empty")
    return table


def numbers(path: Path, table: Any, column: str) -> NDArray[np.float64]:
    """A column of finite numbers."""
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


def sorted_arrivals(path: Path, arrival_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """Arrivals that begin at 0 or later and never go back."""
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


def token_counts(path: Path, table: Any, column: str, least: int = 1) -> NDArray[np.int64]:
    """A column of whole numbers, ``least`` to ``MAX_TOKENS``."""
    counts = numbers(path, table, column)
    for is_bad, reason in (
        (counts < least, f"is less than {least}"),
        (counts != np.floor(counts), "is not a whole number"),
        (counts > MAX_TOKENS, f"is more than {MAX_TOKENS}"),
    ):
        bad = np.flatnonzero(is_bad)
        if bad.size:
            raise WorkloadError(f"{path}: column {column!r}, row {bad[0]}: {_shown(counts[bad[0]])} {reason}")
    return counts.astype(np.int64)


def _shown(value: float) -> str:
    return "null or NaN" if np.isnan(value) else f"{value:g}"


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
