"""The whole ingress in this process: what clients get, over a replica of plain functions."""

import asyncio
from collections.abc import Callable

import pytest

from serving.tenant import tenant_of
from tests.unit.serving.ingress_scene import MODEL, Ingress


def test_an_answer_comes_from_the_replica_through_vllms_server(ingress: Ingress) -> None:
    answer = ingress.post("/v1/completions", {"model": MODEL, "prompt": "hi", "max_tokens": 6})
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["text"] == "abcdef"
    assert [each.max_tokens for each in ingress.links.submitted] == [6]


def test_the_controller_is_told_whose_request_it_is_where_keys_are_checked(
    ingress: Ingress, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, key = {"model": MODEL, "prompt": "hi", "max_tokens": 6}, [("authorization", "Bearer secret")]
    ingress.post("/v1/completions", asked, key)
    monkeypatch.setattr(ingress.door._generate.app, "has_tenants", True)
    ingress.post("/v1/completions", asked, key)
    tenant = tenant_of("/v1/completions", key)
    assert [ask.tenant for ask in ingress.links.admissions] == ["", tenant]
    ingress.run(until(lambda: len(ingress.links.outcomes) == 2))
    assert [(told.tenant, told.output_cap_tokens) for told in ingress.links.outcomes] == [("", 6), (tenant, 6)]


async def until(is_so: Callable[[], bool]) -> None:
    """Let the ingress's tasks run on until something is so; the run's own bound ends it."""
    while not is_so():
        await asyncio.sleep(0.01)
