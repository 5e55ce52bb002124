"""JSON bodies are read strictly, and what no engine could be sent is named by its place."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.ingress.json_body import read_json
from serving.request.slo import SloError

VALUES, DEPTH = 1000, 64
LONG = "1" * 25

plain = (
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
        max_leaves=20,
    )
    | st.text()
)


def mistake(body: bytes) -> SloError:
    with pytest.raises(SloError) as caught:
        read_json(body, VALUES, DEPTH)
    assert str(caught.value).encode(), "the message can be sent"
    return caught.value


@given(plain)
def test_sound_documents_pass_unchanged(document: Any) -> None:
    assert read_json(json.dumps(document).encode(), VALUES, DEPTH) == document


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b'{"stop":["a","\\ud800"]}', "stop.1"),
        (b'{"stop":"\\udfff\\ud800"}', "stop"),
        (b'{"slo":{"\\ud800":1}}', "slo.\\ud800"),
        (b'{"a":{"b":[{"c":"\\ud800"}]}}', "a.b.0.c"),
        (b'"\\ud800"', "body"),
        (b'{"top_k":%d}' % 2**70, "top_k"),
        (b'{"top_k":%d}' % 2**64, "top_k"),
        (b'{"top_k":%d}' % (-(2**63) - 1), "top_k"),
        (b'{"json":{"maximum":[1,%d]}}' % 2**70, "json.maximum.1"),
        (b'{"a":1%s}' % (b"0" * 5000), "body"),
        (b'{"temperature":NaN}', "temperature"),
        (b'{"temperature":[-Infinity]}', "temperature.0"),
        (b'{"temperature":1e999}', "temperature"),
    ],
)
def test_what_cannot_be_sent_is_named(body: bytes, field: str) -> None:
    assert mistake(body).field == field


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (b"", "is not JSON"),
        (b'{"a":', "is not JSON"),
        (b"\xff\xfe{\x00}\x00", "is not UTF-8"),
        (b'"\xed\xa0\x80"', "is not UTF-8"),
        (b"\xef\xbb\xbf{}", "is not JSON"),
        (b"[" * 100_000 + b"]" * 100_000, "more than 1000 values"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "more than 1000 values"),
        (b"[" * (DEPTH + 1) + b"]" * (DEPTH + 1), "deeper than 64"),
        (b"[" + b"1," * VALUES + b"1]", "more than 1000 values"),
        (b"[" + b"[]," * VALUES + b"1]", "more than 1000 values"),
    ],
)
def test_what_is_wrong_with_all_of_it_is_told_of_the_body(body: bytes, what: str) -> None:
    assert mistake(body).field == "body"
    assert what in str(mistake(body))


@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
@pytest.mark.parametrize("depth", [DEPTH + 1, 5000, 100_000])
def test_depth_beyond_the_stack_is_told_as_depth(opening: bytes, depth: int) -> None:
    """Within the number of values, neither parser gets as far as the check of the depth."""
    for body in (opening * depth, opening * depth + b"1" + (b"]" if opening == b"[" else b"}") * depth):
        with pytest.raises(SloError, match="deeper than 64" if depth > DEPTH + 1 else "deeper than 64|not JSON"):
            read_json(body, 10**8, DEPTH)


def test_limits_hold_for_values_and_not_for_text() -> None:
    assert read_json(b"[" * DEPTH + b"]" * DEPTH, VALUES, DEPTH)
    text = json.dumps({"prompt": '[{,\\"' * VALUES}).encode()
    assert read_json(text, VALUES, DEPTH)
    digits = {"prompt": LONG, "seed": 2**63 - 1, "salt": 2**64 - 1, "small": -(2**63)}
    assert read_json(json.dumps(digits).encode(), VALUES, DEPTH) == digits


@pytest.mark.parametrize("tail", [b'\\"' * 300_000, b'\\"' * 300_000 + b"\\", b"a" * 600_000])
def test_a_string_without_an_end_is_read_once(tail: bytes) -> None:
    """Read again from each of its quotes, it would take minutes, in which an ingress serves nobody."""
    with pytest.raises(SloError, match=r"is not JSON|more than"):
        read_json(b"," * (VALUES + 1) + b'"' + tail, VALUES, DEPTH)
