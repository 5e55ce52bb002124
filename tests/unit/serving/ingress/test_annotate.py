"""Annotation of responses and stream events, cut anywhere."""

import itertools
import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.messages import Decision, Slo, Verdict
from serving.ingress.annotate import StreamAnnotator, annotate_json, mend_error, openai_error, openai_tier
from serving.request.state import HttpRequestState

CHAT = (
    b'data: {"id":"1","choices":[{"delta":{"content":"say \\"finish_reason\\":\\"no\\""},"finish_reason":null}]}\n\n'
    b'data: {"id":"1","choices":[{"delta":{"content":"b"},"finish_reason":"length"}]}\n\n'
    b'data: {"id":"1","choices":[],"usage":{"total_tokens":3}}\n\n'
    b"data: [DONE]\n\n"
)


TEXTS = ('data: {"a": 1}', "data: x", 'event: y\n\ndata: {"error": {}}', 'data: {"finish_reason":"no"}')


def served() -> HttpRequestState:
    request_state = HttpRequestState(Slo(10.0, 10.0, tier="gold"))
    request_state.record_decision(
        "x", Decision("x", Verdict.ADMITTED, "r1", "gold", "attainable", 0.5, 0.05), request_state.arrived_s
    )
    request_state.record_tokens("x", 2, request_state.arrived_s + 0.25)
    request_state.sequence("x").finish = "length"
    return request_state


def events(data: bytes) -> list[dict[str, object]]:
    lines = [line for line in data.decode().split("\n") if line.startswith("data: {")]
    return [json.loads(line[6:]) for line in lines]


@given(cuts=st.lists(st.integers(0, len(CHAT)), max_size=6))
def test_stream_is_annotated_the_same_wherever_it_is_cut(cuts: list[int]) -> None:
    annotator, edges = StreamAnnotator(served()), [0, *sorted(cuts), len(CHAT)]
    parts = [annotator.feed(CHAT[a:b], last=False) for a, b in itertools.pairwise(edges)]
    data = b"".join(parts) + annotator.feed(b"", last=True)
    first, second, usage = events(data)
    assert [event["service_tier"] for event in (first, second, usage)] == ["default"] * 3
    assert ["slo" in event for event in (first, second, usage)] == [False, True, False]
    assert data.endswith(b"data: [DONE]\n\n")
    assert data.count(b"\n\n") == CHAT.count(b"\n\n")


def test_a_middle_chunk_is_not_read() -> None:
    annotator = StreamAnnotator(served())
    chunk = b'data: {"id":"1","choices":[{"index":0,"text":"\\u0661 not JSON at all'
    assert annotator.feed(chunk + b"\n\n", last=False) == b'data: {"service_tier":"default",' + chunk[7:] + b"\n\n"


def test_a_stream_that_is_served_another_way_says_so_from_then_on() -> None:
    request_state = served()
    annotator = StreamAnnotator(request_state)
    chunk = b'data: {"id":"1","choices":[]}\n\n'
    decision = Decision("x", Verdict.BEST_EFFORT, "r2", "gold", "no_room")
    told = [annotator.feed(chunk, last=False)]
    request_state.record_decision("x", decision, request_state.arrived_s + 1.0)
    told.append(annotator.feed(chunk, last=False))
    assert [event["service_tier"] for event in events(b"".join(told))] == ["default", "flex"]


def test_the_slo_object_tells_prediction_and_measurement() -> None:
    slo = json.loads(annotate_json(b'{"id":"1"}', served()))["slo"]
    assert (slo["admitted"], slo["tier"], slo["replica"], slo["met"]) == (True, "gold", "r1", True)
    assert (slo["predicted_ttft_ms"], slo["ttft_ms"]) == (500.0, 250.0)


def test_responses_events_carry_tier_and_final_verdict() -> None:
    stream = (
        b'event: response.created\ndata: {"response":{"id":"r","service_tier":"auto"},"type":"response.created"}\n\n'
        b'event: response.completed\ndata: {"response":{"id":"r","service_tier":"auto"},"type":"x"}\n\n'
    )
    created, completed = events(StreamAnnotator(served()).feed(stream, last=False))
    assert created["response"] == {"id": "r", "service_tier": "default"}
    assert completed["response"]["slo"]["met"] is True  # type: ignore[index]


def stream_of(event: Mapping[str, object], name: str = "") -> bytes:
    """As vLLM's server writes it."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(event, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("of_chat", [True, False], ids=["chat", "completions"])
def test_text_that_looks_like_an_event_is_text(text: str, of_chat: bool) -> None:
    said = {"delta": {"content": text}} if of_chat else {"text": text}
    for finish in (None, "stop"):
        event = {"id": "1", "choices": [{**said, "finish_reason": finish}]}
        data = StreamAnnotator(served()).feed(stream_of(event), last=False)
        (annotated,) = events(data)
        assert annotated.pop("service_tier") == "default"
        assert (annotated.pop("slo", None) is not None) == (finish is not None)
        assert annotated == event
        assert data.count(b"\n") == 2


@pytest.mark.parametrize("text", TEXTS)
def test_text_of_named_events_is_text(text: str) -> None:
    delta = {"type": "response.output_text.delta", "delta": text}
    done = {"type": "response.completed", "response": {"id": "r", "output": [{"text": text}]}}
    stop = {"type": "message_delta", "delta": {"stop_reason": "stop_sequence", "stop_sequence": text}}
    told: tuple[dict[str, Any], ...] = (delta, done, stop)
    stream = b"".join(stream_of(event, event["type"]) for event in told)
    first, second, third = events(StreamAnnotator(served()).feed(stream, last=False))
    assert first == delta
    response = second["response"]
    assert isinstance(response, dict)
    assert (response["output"], response["service_tier"]) == ([{"text": text}], "default")
    assert response["slo"]["met"] is True
    assert (third["service_tier"], third["delta"]) == ("default", stop["delta"])


@pytest.mark.parametrize(
    ("others", "met"),
    [((), True), ((("y", 2, 0.3),), True), ((("y", 0, 0.0),), True), ((("y", 1, 11.0),), False)],
    ids=["stop-string", "sibling-on-time", "sibling-not-begun", "sibling-late"],
)
def test_a_last_chunk_is_judged_by_what_came_although_sequences_are_still_open(
    others: tuple[tuple[str, int, float], ...], met: bool
) -> None:
    """A stop string ends a sequence after its last chunk, and other choices run on."""
    request_state = served()
    request_state.sequence("x").finish = ""
    for name, tokens, at_s in others:
        request_state.sequence(name)
        request_state.record_tokens(name, tokens, request_state.arrived_s + at_s)
    chunk = stream_of({"id": "1", "choices": [{"index": 0, "text": "b", "finish_reason": "stop"}]})
    (event,) = events(StreamAnnotator(request_state).feed(chunk, last=False))
    assert event["slo"]["met"] is met  # type: ignore[index]
    assert not request_state.met
    request_state.sequence("x").finish = "abort"
    assert not request_state.slo_object()["met"]


def test_anthropic_stop_event_carries_the_verdict() -> None:
    stream = b'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"end_turn"}}\n\n'
    (event,) = events(StreamAnnotator(served()).feed(stream, last=False))
    assert event["slo"]["tier"] == "gold"  # type: ignore[index]


def test_errors_get_four_keys_with_a_string_code() -> None:
    body = b'{"error":{"message":"This model\'s maximum context length is 4096","type":"BadRequestError","code":400}}'
    error = json.loads(mend_error(body, 400, "/v1/completions"))["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == "context_length_exceeded"
    assert openai_error({"message": "no", "type": "t", "code": 500})["code"] is None


@pytest.mark.parametrize(
    ("message", "param", "code"),
    [
        ("The model `x` does not exist. Valid aliases: y.", "model", "model_not_found"),
        ("The model `x` does not exist.", None, "model_not_found"),
        ("Response with id 'resp_x' not found.", "response_id", "not_found"),
        ("Not Found", None, "not_found"),
    ],
)
def test_a_404_says_what_is_missing(message: str, param: str | None, code: str) -> None:
    """Clients take ``model_not_found`` for a wrong model's name, and may ask another one."""
    error = {"message": message, "type": "NotFoundError", "param": param, "code": 404}
    assert openai_error(error)["code"] == code


@pytest.mark.parametrize(
    ("path", "param"), [("/v1/responses", "previous_response_id"), ("/v1/responses/resp_x", "response_id")]
)
def test_a_404_about_a_response_names_the_field_of_the_request(path: str, param: str) -> None:
    error = {"message": "Response with id 'resp_x' not found.", "param": "response_id", "code": 404}
    told = json.loads(mend_error(json.dumps({"error": error}).encode(), 404, path))["error"]
    assert (told["param"], told["code"]) == (param, "not_found")


def test_errors_have_the_shape_of_their_path() -> None:
    unauthorized = b'{"error":"Unauthorized"}'
    told = {"message": "Unauthorized", "type": "invalid_request_error", "param": None, "code": "invalid_api_key"}
    assert json.loads(mend_error(unauthorized, 401, "/v1/completions")) == {"error": told}
    anthropic = json.loads(mend_error(unauthorized, 401, "/v1/messages"))
    assert anthropic == {"type": "error", "error": {"type": "authentication_error", "message": "Unauthorized"}}
    assert json.loads(mend_error(b'{"detail":"no"}', 400, "/tokenize"))["error"]["message"] == "no"
    assert mend_error(b"plain", 500, "/v1/messages") == b"plain"


@pytest.mark.parametrize(
    ("asked", "verdict", "told"),
    [
        ("", Verdict.ADMITTED, "default"),
        ("priority", Verdict.ADMITTED, "priority"),
        ("priority", Verdict.BEST_EFFORT, "flex"),
        ("gold", Verdict.ADMITTED, "default"),
        ("", Verdict.BEST_EFFORT, "flex"),
    ],
)
def test_the_service_tier_is_one_of_openais(asked: str, verdict: Verdict, told: str) -> None:
    request_state = HttpRequestState(Slo(10.0, 10.0, tier="gold"), service_tier=asked)
    request_state.record_decision("x", Decision("x", verdict, "r1", "gold", "attainable"), request_state.arrived_s)
    assert openai_tier(request_state) == told
    assert openai_tier(HttpRequestState(Slo(best_effort=True, tier="batch"))) == "flex"


def test_a_stream_error_event_is_left_an_error() -> None:
    stream = (
        b'data: {"error":{"message":"gone","type":"InternalServerError","param":null,"code":500}}\n\ndata: [DONE]\n\n'
    )
    data = StreamAnnotator(served()).feed(stream, last=False)
    assert events(data) == [{"error": {"message": "gone", "type": "InternalServerError", "param": None, "code": None}}]


def test_what_is_not_json_passes_unchanged() -> None:
    assert annotate_json(b"plain", served()) == b"plain"
    assert annotate_json(b"[1]", served()) == b"[1]"
