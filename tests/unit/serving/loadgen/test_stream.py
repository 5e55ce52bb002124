"""The stream reader on bytes as servers send them."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.loadgen.stream import StreamReader


def chunk(upto: int | None, text: str = "a", finish: str | None = None, **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish, "token_ids": None}
    usage = {} if upto is None else {"usage": {"prompt_tokens": 5, "completion_tokens": upto, "total_tokens": 5}}
    return {"id": "cmpl-1", "model": "tiny", "choices": [choice], **usage, **more}


def encode(*events: dict[str, Any]) -> bytes:
    return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"


def read(*events: dict[str, Any]) -> StreamReader:
    stream = StreamReader()
    stream.feed(encode(*events), 1.0)
    return stream


def test_each_chunk_has_its_time_and_its_tokens() -> None:
    stream = StreamReader()
    for now_s, event in ((0.5, chunk(1)), (0.7, chunk(4)), (0.9, chunk(5, finish="length"))):
        stream.feed(encode(event), now_s)
    assert stream.chunk_s.tolist() == [0.5, 0.7, 0.9]
    assert stream.chunk_tokens.tolist() == [1, 3, 1]
    assert (stream.tokens, stream.finish, stream.failure(), stream.is_estimated) == (5, "length", "", False)


def test_chunks_without_new_tokens_are_no_tokens() -> None:
    stream = read(chunk(1), chunk(1, text=""), chunk(2), chunk(2, text="", finish="stop"))
    assert stream.chunk_tokens.tolist() == [1, 1]
    assert stream.finish == "stop"


def test_tokens_without_text_count() -> None:
    assert read(chunk(1, text=""), chunk(2, text="", finish="length")).tokens == 2


EVENTS = (
    chunk(2, text='say "error": {"x"}\n\ndata: no'),
    chunk(3, "é🙂"),
    chunk(4, finish="length", service_tier="chat"),
)


@given(st.lists(st.integers(0, 600), max_size=12))
def test_any_cut_of_the_bytes_reads_the_same(cuts: list[int]) -> None:
    data = encode(*EVENTS).replace(b"\n\n", b"\r\n\r\n")
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    stream = StreamReader()
    for start, end in pairwise(edges):
        stream.feed(data[start:end], float(end))
    assert (stream.tokens, stream.finish, stream.error, stream.service_tier) == (4, "length", "", "chat")
    assert stream.chunk_s.tolist() == sorted(stream.chunk_s)


def test_a_server_without_running_totals_is_estimated_by_its_last_one() -> None:
    chunks = [chunk(None, "a"), chunk(None, "bc"), chunk(None, "d"), chunk(None, "", finish="length")]
    stream = read(*chunks, {"choices": [], "usage": {"completion_tokens": 6}})
    assert stream.chunk_tokens.tolist() == [2, 2, 2]
    assert stream.is_estimated


def test_one_token_per_chunk_needs_no_estimate() -> None:
    stream = read(chunk(None), chunk(None, finish="length"), {"choices": [], "usage": {"completion_tokens": 2}})
    assert stream.chunk_tokens.tolist() == [1, 1]
    assert not stream.is_estimated


def test_the_slo_object_is_read_wherever_it_rides() -> None:
    slo = {"admitted": False, "tier": "batch", "replica": "r1", "predicted_ttft_ms": None, "met": False, "resumed": 0}
    on_last = read(chunk(1), chunk(2, finish="length", slo=slo))
    apart = read(chunk(1), chunk(2, finish="length"), {"choices": [], "slo": slo}, {"choices": [], "usage": None})
    for stream in (on_last, apart):
        assert stream.slo is not None
        assert (stream.slo.admitted, stream.slo.tier, stream.slo.predicted_ttft_ms) == (False, "batch", None)
        assert stream.failure() == ""


@pytest.mark.parametrize(
    ("events", "failure"),
    [
        ((chunk(1),), "broke off"),
        ((), "broke off"),
        ((chunk(1), {"error": {"message": "replica lost", "code": 500}}), "replica lost"),
        ((chunk(1), {"error": {}}), "error event"),
        ((chunk(1, finish="abort"),), "finish reason 'abort'"),
        ((chunk(1), {"choices": "none"}, chunk(2, finish="length")), "unreadable event"),
    ],
)
def test_broken_answers_say_why(events: tuple[dict[str, Any], ...], failure: str) -> None:
    assert failure in read(*events).failure()


def test_an_event_in_another_encoding_is_that_streams_error_alone() -> None:
    stream = StreamReader()
    stream.feed(b'data: {"error": {"message": "D\xe9lai"}}\n\n', 0.1)
    assert "unreadable event" in stream.failure()


def test_comments_and_other_fields_are_ignored() -> None:
    stream = StreamReader()
    stream.feed(b": ping\n\nevent: message\nid: 3\n" + encode(chunk(1, finish="stop")), 0.1)
    assert (stream.tokens, stream.failure()) == (1, "")
