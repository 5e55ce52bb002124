"""Compositions and the box they were measured in."""

import pytest

from profiles.batch import Batch, MeasuredRange, compositions, decodes, measurements
from profiles.kernels import attention_pairs


def test_a_chunk_adds_its_tokens_one_sequence_and_its_pairs() -> None:
    batch = decodes(4, 100).with_chunk(32, cached_tokens=64)
    assert batch == Batch(36, 400, attention_pairs(32, 64), 5, 0, 1, 32, 64)
    assert batch.terms == (36, 400, 32 * (64 + 16), 5, 0)


def test_rows_and_scalars_describe_the_same_batch() -> None:
    rows = compositions([0, 3, 5], [0, 50, 70], [16, 0, 8], [32, 999, 0])
    expected = [Batch(0.0, sequences=0.0).with_chunk(16, 32), decodes(3, 50), decodes(5, 70).with_chunk(8)]
    assert [Batch(*row.tolist()) for row in rows] == expected


def test_a_range_is_the_smallest_box_around_its_rows() -> None:
    rows = measurements(compositions([1, 4], [10, 20], [0, 8], 0), [0.1, 0.2])
    box = MeasuredRange.of(rows)
    assert (box.batch_tokens, box.kv_tokens, box.pairs) == ((1, 12), (10, 80), (0, 32))


def test_no_measurements_have_no_range() -> None:
    with pytest.raises(ValueError, match="at least one row"):
        MeasuredRange.of(compositions([], [], [], []))
