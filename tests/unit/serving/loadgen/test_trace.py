"""Traces: what is read, what is refused, and that every refusal names file, column and row."""

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.loadgen.trace import Trace, poisson_arrivals_s, read_trace
from simulation.workloads.traces import WorkloadError
from tests.support.synthetic_trace import small_trace, synthetic_trace

SHARED = Path(__file__).parents[5] / "shared" / "traces"
GOOD: dict[str, list[Any]] = {"arrival_s": [0.0, 1.5, 1.5], "input_tokens": [10, 20, 30], "output_tokens": [1, 2, 3]}


def write(tmp_path: Path, **changes: list[Any] | None) -> Path:
    columns = {name: values for name, values in (GOOD | changes).items() if values is not None}
    path = tmp_path / "trace.parquet"
    pq.write_table(pa.table(columns), path)
    return path


def test_all_formats_read_the_same(tmp_path: Path) -> None:
    csv = b"arrival_s,input_tokens,output_tokens\n0,10,1\n1.5,20,2\n1.5,30,3\n"
    jsonl = b"".join(
        json.dumps(dict(zip(GOOD, row, strict=True))).encode() + b"\n" for row in zip(*GOOD.values(), strict=True)
    )
    contents = {"trace.csv": csv, "trace.jsonl": jsonl}
    contents |= {f"{name}.gz": gzip.compress(content) for name, content in contents.items()}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    for trace in map(read_trace, [write(tmp_path), *(tmp_path / name for name in contents)]):
        assert trace.arrival_s.tolist() == GOOD["arrival_s"]
        assert trace.input_tokens.tolist() == GOOD["input_tokens"]
        assert trace.output_tokens.tolist() == GOOD["output_tokens"]
        assert (trace.app, trace.span_s, trace.name) == (["", "", ""], 1.5, "trace")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"output_tokens": None}, "column 'output_tokens' is missing"),
        ({"arrival_s": [0.0, 2.0, 1.0]}, "column 'arrival_s', row 2: 1 is before the row above it"),
        ({"arrival_s": [-1.0, 0.0, 1.0]}, "column 'arrival_s', row 0: -1 is negative"),
        ({"arrival_s": [0.0, float("nan"), 1.0]}, "column 'arrival_s', row 1: null or NaN is not finite; --poisson"),
        ({"arrival_s": [0.0, 1.0, float("inf")]}, "column 'arrival_s', row 2: inf is not finite"),
        ({"arrival_s": [0.0, None, 1.0]}, "column 'arrival_s', row 1: null"),
        ({"arrival_s": ["0", "x", "1"]}, r"column 'arrival_s' holds string, not numbers \(row 1: 'x'\)"),
        ({"input_tokens": [10, 0, 30]}, "column 'input_tokens', row 1: 0 is less than 1"),
        ({"input_tokens": [10, None, 30]}, "column 'input_tokens', row 1: null"),
        ({"output_tokens": [1, 2, -3]}, "column 'output_tokens', row 2: -3 is less than 1"),
        ({"output_tokens": [1.0, 2.5, 3.0]}, "column 'output_tokens', row 1: 2.5 is not a whole number"),
        ({"output_tokens": [1, 2, 10**9]}, "column 'output_tokens', row 2: 1e"),
        ({name: [] for name in GOOD}, "the trace is empty"),
        ({"prefix_block_hashes": ["a", "b", "c"]}, "column 'prefix_block_hashes', row 0: must hold a list of integers"),
        (
            {"prefix_block_hashes": [["a"], ["b"], []]},
            "column 'prefix_block_hashes', row 0: must hold a list of integers",
        ),
    ],
)
def test_broken_columns_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = write(tmp_path, **changes)
    with pytest.raises(WorkloadError, match=message) as caught:
        read_trace(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.parquet", None, "no such trace file"),
        ("text.parquet", b"this is not parquet at all", "not a readable parquet file"),
        ("empty.parquet", b"", "not a readable parquet file"),
        ("empty.csv", b"", "not a readable CSV file"),
        ("text.csv.gz", b"this is no gzip", "not a readable CSV file"),
        ("empty.jsonl", b"", "not a readable JSONL file"),
        ("words.jsonl", b'{"arrival_s": 0, "input_tokens": "many", "output_tokens": 1}', "'input_tokens' holds string"),
        ("blocks.jsonl", b"[1, 2]", "not a readable JSONL file"),
        ("ragged.csv", b"arrival_s,input_tokens,output_tokens\n0,1,1\n0,1\n", "not a readable CSV file"),
        ("twice.csv", b"arrival_s,input_tokens,output_tokens,app,app\n0,1,1,a,a\n", "column 'app' is there twice"),
        ("header.csv", b"arrival_s,input_tokens,output_tokens\n", "the trace is empty"),
        ("words.csv", b"arrival_s,input_tokens,output_tokens\n0,many,1\n", "column 'input_tokens' holds string"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(WorkloadError, match=message) as caught:
        read_trace(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_lengths_without_arrivals_get_poisson_ones(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, arrival_s=None), poisson_per_s=2.0, seed=1)
    assert trace.arrival_s[0] == 0.0
    assert np.all(np.diff(trace.arrival_s) > 0)


def test_poisson_arrivals_have_their_rate() -> None:
    arrival_s = poisson_arrivals_s(20_000, 5.0, seed=0)
    gaps_s = np.diff(arrival_s)
    assert gaps_s.mean() == pytest.approx(0.2, rel=0.05)
    assert gaps_s.std() / gaps_s.mean() == pytest.approx(1.0, rel=0.05)


def test_blocks_of_different_sessions_differ_where_the_source_numbers_them_apart(tmp_path: Path) -> None:
    table = pa.table(GOOD | {"session_id": ["u", "u", None], "prefix_block_hashes": [[-9, 1], [-9, 2], [-9]]})
    path = tmp_path / "trace.parquet"
    pq.write_table(table.replace_schema_metadata({"prefix_scope": "session", "prefix_block_size_tokens": "16"}), path)
    trace = read_trace(path)
    assert trace.prefix_blocks is not None
    first, second, third = (row[0] for row in trace.prefix_blocks)
    assert first == second != third
    assert min(map(min, trace.prefix_blocks)) >= 0, "prompts are drawn by them"
    assert trace.prefix_block_tokens == 16


def test_scaling_changes_rate_and_lengths_only() -> None:
    trace = synthetic_trace(100, 10.0, 300, 50, seed=1)
    scaled = trace.scaled(rate_scale=4.0, length_scale=0.01)
    assert scaled.arrival_s == pytest.approx(trace.arrival_s / 4.0)
    assert scaled.input_tokens.min() >= 1
    assert scaled.output_tokens.tolist() == np.maximum(1, np.rint(trace.output_tokens * 0.01)).tolist()


def test_head_and_scaling_start_at_zero(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, arrival_s=[5.0, 7.0, 9.0])).scaled(rate_scale=2.0)
    assert trace.arrival_s.tolist() == [0.0, 1.0, 2.0]
    assert len(trace.head(2)) == len(trace.head(2).app) == 2


@given(st.lists(st.tuples(st.integers(1, 500), st.integers(1, 500)), min_size=1, max_size=20), st.integers(2, 400))
def test_fitted_requests_fit_and_those_that_did_are_untouched(lengths: list[tuple[int, int]], limit: int) -> None:
    prompt, output = np.array(lengths).T
    trace = Trace("t", np.zeros(len(lengths)), prompt, output, [""] * len(lengths))
    fitted, cut = trace.fitted(limit)
    fits = prompt + output <= limit
    assert cut == np.count_nonzero(~fits)
    assert np.all(fitted.input_tokens + fitted.output_tokens <= limit)
    assert np.all(fitted.input_tokens[fits] == prompt[fits])
    assert np.all(fitted.output_tokens[fits] == output[fits])
    assert fitted.input_tokens.min() >= 1
    assert fitted.output_tokens.min() >= 1


@pytest.mark.parametrize("name", ["azure_2023_conv", "azure_2023_code", "mooncake_conversation"])
def test_shared_traces_read_whole(name: str) -> None:
    path = SHARED / f"{name}.parquet"
    if not path.exists():
        pytest.skip(f"{path} is not here")
    trace = read_trace(path)
    assert len(trace) == pq.read_metadata(path).num_rows
    assert (trace.prefix_blocks is not None) == name.startswith("mooncake")


@pytest.mark.parametrize("scale", [1e18, 1e300, sys.float_info.max])
def test_a_length_beyond_any_names_the_option(scale: float) -> None:
    with pytest.raises(WorkloadError, match="--length-scale"):
        small_trace().scaled(length_scale=scale)
