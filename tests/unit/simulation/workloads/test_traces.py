"""Prefix blocks of traces: the simulator reads what a replay reads, and names what neither can."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from serving.loadgen.trace import read_trace as read_for_replay
from simulation.workloads.traces import WorkloadError, read_trace

COLUMNS: dict[str, Any] = {"arrival_s": [0.0, 1.0, 2.0], "input_tokens": [1000, 1000, 10], "output_tokens": [5, 5, 5]}


def written(folder: Path, metadata: Mapping[str, str], **columns: Any) -> Path:
    path = folder / "trace.parquet"
    pq.write_table(pa.table(COLUMNS | columns).replace_schema_metadata(metadata), path)
    return path


@pytest.mark.parametrize(
    ("columns", "scope", "same"),
    [
        ({"session_id": ["x", "y", "x"]}, "session", [True, False, True]),
        ({"session_id": ["x", None, "x"]}, "session", [True, False, True]),
        ({"session_id": [7, 8, 7]}, "session", [True, False, True]),
        ({"session_id": ["x", "y", "x"]}, "", [True, True, True]),
        ({}, "session", [True, True, True]),
    ],
)
@pytest.mark.parametrize("block", [-5, 2**63 + 5])
def test_equal_blocks_are_equal_within_their_scope(
    tmp_path: Path, columns: dict[str, Any], scope: str, same: list[bool], block: int
) -> None:
    kind = pa.list_(pa.uint64() if block > 0 else pa.int64())
    hashes = pa.array([[block, 1], [block], [block]], type=kind)
    metadata = {"prefix_scope": scope, "prefix_block_size_tokens": "16"}
    path = written(tmp_path, metadata, prefix_block_hashes=hashes, **columns)
    trace, replayed = read_trace(path), read_for_replay(path)
    assert replayed.prefix_blocks is not None
    first = [trace.blocks[at] for at in trace.first_block]
    assert [each == first[0] for each in first] == same
    assert [blocks[0] == replayed.prefix_blocks[0][0] for blocks in replayed.prefix_blocks] == same
    assert trace.block_tokens == replayed.prefix_block_tokens == 16


@pytest.mark.parametrize("read", [read_trace, read_for_replay])
@pytest.mark.parametrize(
    ("hashes", "size", "message"),
    [
        ([[1], [1], [1]], "abc", "prefix_block_size_tokens in its metadata must be a number from 1, got 'abc'"),
        ([[1], [1], [1]], "0", "prefix_block_size_tokens in its metadata"),
        ([["q"], ["q"], []], "16", "column 'prefix_block_hashes', row 0: must hold a list of integers"),
        ([1, 2, 3], "16", "column 'prefix_block_hashes', row 0: must hold a list of integers"),
    ],
)
def test_what_cannot_be_read_is_named(
    tmp_path: Path, read: Callable[[Path], object], hashes: Any, size: str, message: str
) -> None:
    path = written(tmp_path, {"prefix_block_size_tokens": size}, prefix_block_hashes=hashes)
    with pytest.raises(WorkloadError, match=message) as caught:
        read(path)
    assert str(caught.value).startswith(str(path))
