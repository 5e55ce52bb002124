"""The whole ingress in this process: what clients get, over a replica of plain functions."""

import asyncio
from collections.abc import Callable

import pytest

from protocol.messages import AdmissionRequest, Decision, Scope
from serving.request.tenant import tenant_of
from tests.support.ingress_scene import MODEL, Ingress, admitted, refused


def test_an_answer_comes_from_the_replica_through_vllms_server(ingress: Ingress) -> None:
    answer = ingress.post("/v1/completions", {"model": MODEL, "prompt": "hi", "max_tokens": 6})
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["text"] == "abcdef"
    assert [each.max_tokens for each in ingress.transport.submitted] == [6]


def test_the_controller_is_told_whose_request_it_is_where_keys_are_checked(
    ingress: Ingress, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, key = {"model": MODEL, "prompt": "hi", "max_tokens": 6}, [("authorization", "Bearer secret")]
    ingress.post("/v1/completions", asked, key)
    monkeypatch.setattr(ingress.ingress_app._generate.app, "has_tenants", True)
    ingress.post("/v1/completions", asked, key)
    tenant = tenant_of("/v1/completions", key)
    assert [ask.tenant for ask in ingress.transport.admissions] == ["", tenant]
    ingress.run(until(lambda: len(ingress.transport.outcomes) == 2))
    assert [(told.tenant, told.output_cap_tokens) for told in ingress.transport.outcomes] == [("", 6), (tenant, 6)]


@pytest.mark.parametrize("asked", [{"prompt": "hi", "n": 4}, {"prompt": ["a", "b", "c", "d"]}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_of_which_a_part_finds_no_room_is_one_refusal(
    ingress: Ingress, asked: dict[str, object], stream: bool
) -> None:
    """Some choices ended with ``abort`` and no text behind a 200, or never appeared in the stream."""
    decided: list[str] = []

    def all_but_the_last(ask: AdmissionRequest) -> Decision:
        decided.append(ask.group)
        return refused(ask) if len(decided) == 4 else admitted(ask)

    ingress.transport.decide = all_but_the_last
    answer = ingress.post("/v1/completions", {"model": MODEL, "max_tokens": 6, "stream": stream, **asked})
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "2")
    assert len(decided) == 4
    assert len(set(decided)) == 1, "asked about as one"
    assert ingress.transport.submitted == []
    ingress.run(until(lambda: any(told.scope == Scope.REQUEST for told in ingress.transport.outcomes)))
    assert [told.scope for told in ingress.transport.outcomes].count(Scope.REQUEST) == 1
    assert not any(told.scope == Scope.WHOLE for told in ingress.transport.outcomes)


async def until(is_so: Callable[[], bool]) -> None:
    """Let the ingress's tasks run on until something is so; the run's own bound ends it."""
    while not is_so():
        await asyncio.sleep(0.01)
