"""What clients get for hostile and for ordinary requests, from the whole ingress in this process."""

import asyncio
import json
import threading
import time
from typing import Any

import msgspec
import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response

from protocol.messages import Verdict
from serving.ingress import vllm_front_end
from serving.ingress.guard import ARRIVED
from tests.support.ingress_scene import MODEL, Ingress, admitted, refused

CHAT = [{"role": "user", "content": "hi"}]
HALF = "\ud800"
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 6},
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 6},
    "/v1/responses": {"input": "hi", "max_output_tokens": 6},
    "/v1/messages": {"messages": CHAT, "max_tokens": 6},
}


def sound(path: str = "/v1/completions", **more: Any) -> dict[str, Any]:
    return {"model": MODEL, **BODIES[path], **more}


def written(document: Any) -> bytes:
    """As JSON with escapes, so that half a surrogate pair can be sent."""
    return json.dumps(document).encode()


def schema(rules: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": rules}}


@pytest.mark.parametrize(
    ("path", "more", "field"),
    [
        ("/v1/completions", {"stop": [HALF]}, "stop.0"),
        ("/v1/completions", {"bad_words": [HALF]}, "bad_words.0"),
        ("/v1/completions", {"vllm_xargs": {"a": HALF}}, "vllm_xargs.a"),
        ("/v1/completions", {"vllm_xargs": {"kv_transfer_params": "a"}}, "vllm_xargs.kv_transfer_params"),
        ("/v1/completions", {"kv_transfer_params": {"a": HALF}}, "kv_transfer_params.a"),
        ("/v1/completions", {"ec_transfer_params": {"a": HALF}}, "ec_transfer_params.a"),
        ("/v1/completions", {"top_k": 2**70}, "top_k"),
        ("/v1/completions", {"structured_outputs": {"json": {"maximum": 2**70}}}, "structured_outputs.json.maximum"),
        ("/v1/completions", {"structured_outputs": {"grammar": 'root ::= root "a"'}}, "structured_outputs"),
        ("/v1/completions", {"structured_outputs": {"grammar": 'start: start "a"'}}, "structured_outputs"),
        ("/v1/completions", {"structured_outputs": {"json": {"$ref": "#"}}}, "structured_outputs"),
        ("/v1/completions", {"slo": {HALF: 1}}, "slo.\\ud800"),
        ("/v1/completions", {"slo": {"program": {HALF: 1}}}, "slo.program.\\ud800"),
        ("/v1/completions", {"structured_outputs": {"choice": ["a" * 1000] * 70}}, "structured_outputs"),
        ("/v1/completions", {"logit_bias": {str(i): 1 for i in range(5000)}}, "logit_bias"),
        ("/v1/completions", {"n": 1000}, "n"),
        ("/v1/completions", {"prompt": ["a"] * 100, "n": 2}, "n"),
        ("/v1/completions", {"prompt": [[1]] * 129}, "n"),
        ("/v1/completions", {"prompt": [70] * 3000, "prompt_logprobs": 20}, "prompt_logprobs"),
        ("/v1/completions", {"prompt": [70] * 3000, "echo": True, "logprobs": 20}, "prompt_logprobs"),
        ("/v1/completions", {"prompt": HALF}, "prompt"),
        ("/v1/chat/completions", {"session_id": HALF}, "session_id"),
        ("/v1/chat/completions", {"request_id": "a" * 129}, "request_id"),
        ("/v1/chat/completions", {"request_id": "é"}, "request_id"),
        ("/v1/chat/completions", {"thinking_token_budget": 2**70}, "thinking_token_budget"),
        ("/v1/chat/completions", {"response_format": schema({"$ref": "#"})}, "structured_outputs"),
        (
            "/v1/chat/completions",
            {"response_format": schema({"maximum": 2**70})},
            "response_format.json_schema.schema.maximum",
        ),
        ("/v1/responses", {"input": HALF}, "input"),
        ("/v1/responses", {"background": True}, "background"),
        (
            "/v1/messages",
            {"output_config": {"format": {"type": "json_schema", "schema": {"enum": ["a" * 70_000]}}}},
            None,
        ),
    ],
)
def test_what_no_engine_can_serve_is_a_400_that_names_the_field(
    ingress: Ingress, path: str, more: dict[str, Any], field: str | None
) -> None:
    """Errors of ``/v1/messages`` have no place for it."""
    answer = ingress.post(path, written(sound(path, **more)))
    assert (answer.status_code, answer.json()["error"].get("param")) == (400, field)
    assert not ingress.transport.submitted
    assert not ingress.client.dispatcher.requests
    assert ingress.post(path, sound(path)).status_code == 200


@pytest.mark.parametrize("path", [*BODIES, "/invocations", "/tokenize", "/detokenize", "/v1/messages/count_tokens"])
@pytest.mark.parametrize("opening", ["[", '{"a":', '{"slo":{"program":['])
def test_brackets_without_end_are_a_400(ingress: Ingress, path: str, opening: str) -> None:
    answer = ingress.post(path, (opening * 10_000).encode())
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


def test_a_request_that_cannot_be_encoded_leaves_the_others_alone(ingress: Ingress) -> None:
    """The ingress's own check is passed by: what is left is the encoding at submission."""

    async def all_at_once() -> list[Any]:
        from vllm.sampling_params import SamplingParams

        engine = ingress.server_state.engine_client

        async def direct(request_id: str, **sampling: Any) -> Any:
            params = SamplingParams(max_tokens=3, **sampling)
            prompt = {"prompt_token_ids": [70]}
            return [part async for part in engine.generate(prompt, params, request_id)][-1]

        calls = [direct("bad", extra_args={"a": HALF}), *(direct(f"good{i}") for i in range(12))]
        told = await asyncio.gather(*calls, return_exceptions=True)
        assert engine.output_processor.get_num_unfinished_requests() == 0
        return told

    bad, *good = ingress.run(all_at_once())
    assert getattr(bad, "parameter", "") == "extra_args"
    assert len([answer for answer in good if answer.finished]) == 12


@pytest.mark.parametrize(
    ("body", "verdict", "told", "tier"),
    [
        ({}, Verdict.ADMITTED, "default", "standard"),
        ({"service_tier": "auto"}, Verdict.ADMITTED, "default", "standard"),
        ({"service_tier": "default"}, Verdict.ADMITTED, "default", "standard"),
        ({"service_tier": "priority"}, Verdict.ADMITTED, "priority", "interactive"),
        ({"service_tier": "interactive"}, Verdict.ADMITTED, "default", "interactive"),
        ({"service_tier": "flex"}, Verdict.ADMITTED, "flex", "batch"),
        ({}, Verdict.BEST_EFFORT, "flex", "standard"),
    ],
)
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
def test_typed_clients_can_read_the_service_tier(
    ingress: Ingress, path: str, stream: bool, body: dict[str, Any], verdict: Verdict, told: str, tier: str
) -> None:
    ingress.transport.decide = lambda ask: msgspec.structs.replace(admitted(ask), verdict=verdict)
    answer = ingress.post(path, sound(path, stream=stream, **body))
    assert (answer.status_code, answer.headers["x-slo-tier"]) == (200, tier)
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    documents = [json.loads(line) for line in lines] if stream else [answer.json()]
    kinds: dict[str, Any] = {
        "/v1/completions": Completion,
        "/v1/chat/completions": ChatCompletionChunk if stream else ChatCompletion,
        "/v1/responses": Response,
    }
    found = set()
    for document in documents:
        inner = document.get("response", document)
        if "service_tier" in inner:
            found.add(inner["service_tier"])
            if path in kinds:
                kinds[path].model_validate(inner, strict=True)
        if "slo" in inner:
            assert inner["slo"]["tier"] == tier
    assert found == {told}


@pytest.mark.parametrize("path", BODIES)
def test_refusals_say_why_for_whom_and_in_the_clients_shape(ingress: Ingress, path: str) -> None:
    ingress.transport.decide = refused
    for stream in (False, True):
        answer = ingress.post(path, sound(path, stream=stream), [("x-slo-tier", "interactive")])
        assert answer.status_code == 429
        assert (answer.headers["x-slo-tier"], answer.headers["retry-after"]) == ("interactive", "2")
        told = answer.json()
        assert told["error"]["type"] == "rate_limit_error"
        assert (told.get("type") == "error") == (path == "/v1/messages")
        assert ("code" in told["error"]) == (path != "/v1/messages")


@pytest.mark.parametrize(
    ("more", "headers", "status", "kind"),
    [
        ({"max_tokens": -1}, [], 400, "invalid_request_error"),
        ({"slo": {"x": 1}}, [], 400, "invalid_request_error"),
        ({}, [("x-slo-ttft-ms", "1" * 14_000)], 400, "invalid_request_error"),
        ({"model": "nope"}, [], 404, "not_found_error"),
        ({"messages": [{"role": "user", "content": "a" * (5 << 20)}]}, [], 413, "request_too_large"),
        ({}, [("x-large", "a" * 20_000)], 431, "invalid_request_error"),
    ],
)
def test_errors_of_the_messages_api_have_anthropics_shape(
    ingress: Ingress, more: dict[str, Any], headers: list[Any], status: int, kind: str
) -> None:
    answer = ingress.post("/v1/messages", sound("/v1/messages", **more), headers)
    told = answer.json()
    assert (answer.status_code, told["type"], told["error"]["type"]) == (status, "error", kind)
    assert set(told["error"]) == {"type", "message"}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
def test_an_error_carries_no_verdict(ingress: Ingress, path: str) -> None:
    told = ingress.post(path, sound(path, model="nope")).json()
    assert not {"slo", "service_tier"} & told.keys()


def test_time_before_the_body_counts(ingress: Ingress) -> None:
    async def late() -> None:
        body = json.dumps(sound()).encode()
        parts = [{"type": "http.request", "body": body, "more_body": False}]
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            ARRIVED: time.monotonic() - 50.0,
        }

        async def receive() -> Any:
            return parts.pop() if parts else await asyncio.Event().wait()

        async def send(_message: Any) -> None:
            return None

        await ingress.ingress_app(scope, receive, send)

    ingress.run(late())
    assert ingress.transport.admissions[0].age_s >= 50.0


def test_openais_client_reads_our_errors(ingress: Ingress) -> None:
    answer: Any = ingress.post("/v1/completions", sound(n=1000))  # openai names a copy of httpx of its own
    error = openai.BadRequestError("", response=answer, body=answer.json()["error"])
    assert (error.param, error.code) == ("n", "invalid_value")


def held_up(what: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> threading.Event:
    """Makes ``what.name`` wait, in whichever thread it runs, until the event that is returned is set."""
    original, goes = getattr(what, name), threading.Event()

    def wait(*arguments: Any) -> Any:
        assert goes.wait(60)
        return original(*arguments)

    monkeypatch.setattr(what, name, wait)
    return goes


def test_nobody_waits_for_the_check_of_anothers_grammar(ingress: Ingress, monkeypatch: pytest.MonkeyPatch) -> None:
    goes = held_up(vllm_front_end, monkeypatch, "says_nothing")

    async def scenario() -> tuple[list[int], bool, int]:
        first = asyncio.create_task(ingress.ask("/v1/completions", sound(structured_outputs={"regex": "a+"})))
        others = [(await ingress.ask("/v1/completions", sound())).status_code for _ in range(20)]
        still_checked = not first.done()
        goes.set()
        return others, still_checked, (await first).status_code

    others, still_checked, status = ingress.run(scenario())
    assert others == 20 * [200]
    assert still_checked
    assert status == 200


def test_nobody_waits_for_a_slow_grammar_to_have_his_own_checked(
    ingress: Ingress, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound_check, goes = vllm_front_end.says_nothing, threading.Event()

    def check(constraint: Any) -> bool:
        assert constraint.regex != "slow" or goes.wait(60)
        return sound_check(constraint)

    async def scenario() -> None:
        slow = asyncio.create_task(ingress.ask("/v1/completions", sound(structured_outputs={"regex": "slow"})))
        for _ in range(5):
            quick = await ingress.ask("/v1/completions", sound(structured_outputs={"regex": "a+"}))
            assert quick.status_code == 200
        assert not slow.done()
        goes.set()
        assert (await slow).status_code == 200

    monkeypatch.setattr(vllm_front_end, "says_nothing", check)
    ingress.run(scenario())


def test_nobody_waits_for_the_tokens_of_anothers_long_text(ingress: Ingress) -> None:
    lanes, goes = ingress.server_state.engine_client.renderer._executor, threading.Event()
    slow = lanes.submit(lambda _prompt: goes.wait(60), {"prompt": "a" * 25_000})
    try:
        assert ingress.post("/v1/completions", sound()).status_code == 200
        assert not slow.done()
    finally:
        goes.set()
    assert slow.result(60)
