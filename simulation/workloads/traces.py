"""Traces as arrays: any parquet of the common schema (arrival_s, input_tokens, output_tokens, ...)."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

REQUIRED = ("input_tokens", "output_tokens")


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
    """Read a trace; raises ``ValueError`` naming the file and the column that is missing or not usable."""
    import pyarrow.parquet

    if not path.is_file():
        raise ValueError(f"{path}: no such trace file")
    table = pyarrow.parquet.read_table(path)
    for column in REQUIRED:
        if column not in table.column_names:
            raise ValueError(f"{path}: column {column!r} is missing (found: {', '.join(table.column_names)})")
    columns = {name: table.column(name) for name in table.column_names}
    arrival_s = np.zeros(0)
    if "arrival_s" in columns and columns["arrival_s"].null_count == 0:
        arrival_s = columns["arrival_s"].to_numpy().astype(np.float64)
        if (np.diff(arrival_s) < 0).any() and "session_id" not in columns:
            raise ValueError(f"{path}: column 'arrival_s' is not sorted")
    lengths = {name: columns[name].to_numpy().astype(np.int64) for name in REQUIRED}
    for name, tokens in lengths.items():
        if len(tokens) == 0 or tokens.min() < (name == "input_tokens"):
            raise ValueError(f"{path}: column {name!r} must hold lengths from {int(name == 'input_tokens')} on")
    lengths["output_tokens"] = np.maximum(1, lengths["output_tokens"])  # recorded without output: cut off at the first
    rows: int = table.num_rows
    app = np.array(columns["app"].to_pylist()) if "app" in columns else np.full(rows, "")
    session = columns["session_id"].to_numpy() if "session_id" in columns else np.arange(rows)
    metadata = table.schema.metadata or {}
    block_tokens = int(metadata.get(b"prefix_block_size_tokens", b"512"))
    scoped = metadata.get(b"prefix_scope") == b"session"
    blocks = _blocks(columns.get("prefix_block_hashes"), session if scoped else np.zeros(rows, dtype=np.int64), rows)
    inputs, outputs = (lengths[name] for name in REQUIRED)
    return Trace(path.stem, arrival_s, inputs, outputs, app, session, *blocks, block_tokens)


def _blocks(column: object, scope: np.ndarray, rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Block ids one after the other, where each request's begin, and how many it has; equal ids in one scope only."""
    none = np.zeros(rows, dtype=np.int64)
    if column is None:
        return np.zeros(0, dtype=np.int64), none, none
    lists = column.to_pylist()  # type: ignore[attr-defined]
    count = np.array([len(ids or ()) for ids in lists])
    flat = np.array([block for ids in lists for block in ids or ()], dtype=np.int64)
    owner = np.repeat(scope, count)
    _ids, dense = np.unique(np.stack((owner, flat)), axis=1, return_inverse=True)
    return dense.reshape(-1).astype(np.int64), np.cumsum(count) - count, count
