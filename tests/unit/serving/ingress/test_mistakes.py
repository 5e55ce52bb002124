"""Mistakes of clients, and failures of engines, that show after vLLM's server has begun to answer."""

import asyncio
import json
from typing import Any

import httpx
import msgspec
import pytest

from protocol.messages import Delta, Outputs
from serving.config.app import AppConfig
from tests.support.ingress_scene import MODEL, Ingress, refused
from tests.unit.serving.ingress.test_requests import BODIES, schema, sound, written


@pytest.mark.parametrize(
    ("path", "more", "field"),
    [
        ("/v1/completions", {"prompt": [70] * 3000, "prompt_logprobs": 20, "n": 2}, "prompt_logprobs"),
        ("/v1/completions", {"structured_outputs": {"json": {"$ref": "#"}}}, "structured_outputs"),
        ("/v1/chat/completions", {"response_format": schema({"$ref": "#"})}, "structured_outputs"),
        (
            "/v1/responses",
            {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"$ref": "#"}}}},
            "structured_outputs",
        ),
        ("/v1/messages", {"output_config": {"format": {"type": "json_schema", "schema": {"$ref": "#"}}}}, None),
    ],
)
def test_a_mistake_that_is_found_after_a_stream_has_begun_is_a_400_as_well(
    ingress: Ingress, path: str, more: dict[str, Any], field: str | None
) -> None:
    """It was 200 with an error event, and 500 without a body where the stream announces itself before.

    Errors of ``/v1/messages`` have no place for the field.
    """
    answer = ingress.post(path, written(sound(path, stream=True, **more)))
    assert (answer.status_code, answer.headers["content-type"]) == (400, "application/json")
    error = answer.json()["error"]
    assert error.get("param") == field
    assert (field or "structured_outputs") in error["message"]
    assert not ingress.client.dispatcher.requests


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "more", "field"),
    [
        ("/v1/completions", {"logprobs": 1, "n": 2}, "logprobs"),
        ("/v1/completions", {"prompt_logprobs": 1, "stream": False}, "prompt_logprobs"),
        ("/v1/completions", {"structured_outputs": {"regex": "a+"}}, "structured_outputs"),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 2}, "logprobs"),
        ("/v1/responses", {"include": ["message.output_text.logprobs"], "top_logprobs": 2}, "logprobs"),
    ],
)
def test_what_engines_without_logits_cannot_compute_is_a_400_that_names_the_field(
    ingress: Ingress, monkeypatch: pytest.MonkeyPatch, path: str, more: dict[str, Any], field: str, stream: bool
) -> None:
    """Simulated and timed engines; vLLM's server failed where it looked for what they had not sent."""
    config = AppConfig.read({"engine": {"device": "timed"}, "profile": "embedded-cpu"})
    monkeypatch.setattr(ingress.client, "_not_computed", config.not_computed)
    answer = ingress.post(path, sound(path, **({"stream": stream} | more)))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
    assert ingress.transport.submitted == []


async def failed(
    ingress: Ingress, path: str, stream: bool, tokens: int, body: dict[str, Any] | None = None
) -> httpx.Response:
    """What a request gets whose engine fails after so many tokens, and no other goes on."""
    transport, dispatcher = ingress.transport, ingress.client.dispatcher
    transport.holds = True
    asking = asyncio.create_task(ingress.ask(path, body or sound(path, stream=stream)))
    async with asyncio.timeout(30):
        while not transport.submitted:
            await asyncio.sleep(0.001)
        if tokens:
            delta = Delta(transport.submitted[0].request_id, tuple(range(97, 97 + tokens)))
            transport._queue.put_nowait(Outputs(0, True, (delta,)))
            while not any(b"_delta" in part or b".delta" in part for part in ingress.sent):
                await asyncio.sleep(0.001)
        dispatcher.registry.fail(list(dispatcher.requests.values()))
        return await asking


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_a_request_that_fails_before_its_first_token_is_a_500(ingress: Ingress, path: str, stream: bool) -> None:
    """Streams were 200 with an error event, and those of the Responses API 500 without a body."""
    answer = ingress.run(failed(ingress, path, stream, tokens=0))
    assert (answer.status_code, answer.headers["content-type"]) == (500, "application/json")
    error = answer.json()["error"]
    assert error["message"] == "The request failed before its first token."
    is_anthropic = path == "/v1/messages"
    assert (error["type"], error.get("code")) == (
        ("api_error", None) if is_anthropic else ("server_error", "engine_error")
    )


def test_a_response_that_fails_after_tokens_ends_with_an_event_that_says_so(ingress: Ingress) -> None:
    """Its connection was cut."""
    answer = ingress.run(failed(ingress, "/v1/responses", True, tokens=2))
    assert answer.status_code == 200
    *events, last = answer.text.removesuffix("\n\n").split("\n\n")
    assert any("output_text.delta" in event for event in events)
    name, _, data = last.partition("\n")
    told = {"type": "error", "code": "server_error", "message": "The request failed.", "param": None}
    assert (name, json.loads(data.removeprefix("data: "))) == ("event: error", {**told, "sequence_number": len(events)})
    assert json.loads(events[-1].partition("data: ")[2])["sequence_number"] == len(events) - 1


def test_a_message_that_fails_after_tokens_ends_with_an_error_of_anthropics(ingress: Ingress) -> None:
    """It was pydantic's text about a chunk of another API."""
    answer = ingress.run(failed(ingress, "/v1/messages", True, tokens=2))
    assert "content_block_delta" in answer.text
    name, _, data = answer.text.removesuffix("\n\n").rpartition("\n\n")[2].partition("\n")
    told = {"type": "error", "error": {"type": "api_error", "message": "Internal server error"}}
    assert (name, json.loads(data.removeprefix("data: "))) == ("event: error", told)


def test_as_many_items_as_the_limit_are_scored_and_no_more(ingress: Ingress) -> None:
    """Each is a request of an engine."""
    body = {"model": MODEL, "query": "a", "label_token_ids": [70], "items": ["b"] * 129}
    answer = ingress.post("/generative_scoring", body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "items")
    assert not ingress.transport.submitted
    ingress.post("/generative_scoring", body | {"items": ["b"] * 3})
    assert len(ingress.transport.submitted) == 3


def test_scores_that_no_replica_computes_are_no_mistake_of_the_client(ingress: Ingress) -> None:
    """They were 400s about logprobs and items."""
    body = {"model": MODEL, "query": "a", "label_token_ids": [70], "items": ["b", "c"]}
    ingress.transport.decide = lambda ask: msgspec.structs.replace(refused(ask), reason="no_replica")
    answer = ingress.post("/generative_scoring", body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_replica")
    assert int(answer.headers["retry-after"]) > 0
    ingress.reset()
    answer = ingress.run(failed(ingress, "/generative_scoring", False, 0, body))
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "engine_error")
    assert ingress.post("/generative_scoring", {**body, "items": []}).status_code == 400


def test_scores_whose_client_has_left_are_abandoned(ingress: Ingress) -> None:
    """They counted as requests that had met a stop string without a token: as missed."""
    body = {"model": MODEL, "query": "a", "label_token_ids": [70], "items": ["b", "c"]}
    transport = ingress.transport

    async def leave() -> None:
        transport.holds = True
        asking = asyncio.create_task(ingress.ask("/generative_scoring", body))
        async with asyncio.timeout(30):
            while len(transport.submitted) < 2:
                await asyncio.sleep(0.001)
            asking.cancel()
            while len(transport.outcomes) < 2:
                await asyncio.sleep(0.001)

    ingress.run(leave())
    assert [outcome.finish for outcome in transport.outcomes] == ["abort"] * 2
