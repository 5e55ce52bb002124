"""The middleware in front of an application that says what reached it."""

import asyncio
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest

from serving.plug_in.middleware import ObjectiveMiddleware

CONFIG = {"polyslo": {"tiers": [{"name": "chat", "ttft_ms": 500, "tpot_ms": 50}]}}


class Echo:
    """Starlette's side of the seam: ``scope["app"].state``, then the middleware."""

    def __init__(self, config: Any) -> None:
        self.state = SimpleNamespace(vllm_config=SimpleNamespace(additional_config=config))
        self.middleware = ObjectiveMiddleware(self.echo)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.middleware({**scope, "app": self}, receive, send)

    async def echo(self, scope: Any, receive: Any, send: Any) -> None:
        body = (await receive())["body"]
        assert len(body) == int(dict(scope["headers"])[b"content-length"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})


def post(
    body: Any, headers: dict[str, str] | None = None, path: str = "/v1/completions", root_path: str = ""
) -> httpx.Response:
    content = body if isinstance(body, bytes) else msgspec.json.encode(body)

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(Echo(CONFIG), root_path=root_path)
        async with httpx.AsyncClient(transport=transport, base_url="http://vllm") as client:
            return await client.post(path, content=content, headers=headers)

    return asyncio.run(ask())


def test_headers_reach_the_body() -> None:
    told = post({"prompt": "a", "slo": {"tpot_ms": 60}}, {"x-slo-ttft-ms": "300", "x-slo-tier": "chat"}).json()
    assert told == {"prompt": "a", "vllm_xargs": {"slo_ttft_ms": 300.0, "slo_tpot_ms": 60.0, "slo_tier": "chat"}}


@pytest.mark.parametrize("body", [b'{"prompt":  "a"}', b"not json", b"[1]", b""])
def test_what_has_no_objective_passes_unchanged(body: bytes) -> None:
    assert post(body).content == body


def test_a_mistake_is_400_with_its_field() -> None:
    answer = post({"prompt": "a"}, {"x-slo-ttft-ms": "soon"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "x-slo-ttft-ms"
    answer = post({"prompt": "a", "vllm_xargs": {"slo_tier": "gold"}})
    assert answer.json()["error"]["message"].startswith("vllm_xargs.slo_tier: no tier 'gold'")
    assert post({"prompt": "a"}, {"x-slo-ttft-ms": "soon"}, path="/tokenize").status_code == 200


@pytest.mark.parametrize("path", ["/llm/v1/messages", "/v1/messages"], ids=["kept", "stripped by the proxy"])
def test_objectives_count_behind_a_root_path(path: str) -> None:
    """As with vLLM's own check of keys, the proxy may have stripped it."""
    told = post({"prompt": "a"}, {"x-slo-ttft-ms": "300"}, path, "/llm").json()
    assert told["vllm_xargs"] == {"slo_ttft_ms": 300.0}
    assert post({"prompt": "a"}, {"x-slo-ttft-ms": "soon"}, path, "/llm").json()["type"] == "error"
