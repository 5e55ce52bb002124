"""Mistakes of clients that show after vLLM's server has begun to answer, and what no engine computes."""

from typing import Any

import pytest

from serving.config.app import AppConfig
from tests.support.ingress_scene import Ingress
from tests.unit.serving.ingress.test_requests import schema, sound, written


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
    ],
)
def test_a_mistake_that_is_found_after_a_stream_has_begun_is_a_400_as_well(
    ingress: Ingress, path: str, more: dict[str, Any], field: str
) -> None:
    """It was 200 with an error event, and 500 without a body where the stream announces itself before."""
    answer = ingress.post(path, written(sound(path, stream=True, **more)))
    assert (answer.status_code, answer.headers["content-type"]) == (400, "application/json")
    assert answer.json()["error"]["param"] == field
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
