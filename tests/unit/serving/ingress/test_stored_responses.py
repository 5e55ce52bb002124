"""Stored responses belong to the tenant that made them: for any other they do not exist."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from serving.request.tenant import current_tenant, tenant_by

pytest.importorskip("ray")
pytest.importorskip("vllm")

if TYPE_CHECKING:
    from tests.support.ingress_scene import Ingress

OWN, OTHER = "own", "other"
UNKNOWN = "resp_none"
MOST = 5


@pytest.fixture(scope="module")
def scene() -> "Iterator[Ingress]":
    from tests.support.ingress_scene import Ingress

    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("VLLM_ENABLE_RESPONSES_API_STORE", "1")
        model = {"id": "embedded", "server_kwargs": {"api_key": [OWN, OTHER]}}
        with Ingress(model=model, ingress={"limits": {"stored_responses": MOST}}) as made:
            yield made


def ask(scene: "Ingress", key: str, path: str, body: Any = None, method: str = "POST") -> httpx.Response:
    answer: httpx.Response = scene.run(scene.ask(path, body, [("authorization", f"Bearer {key}")], method))
    return answer


def made(scene: "Ingress", key: str, **more: Any) -> httpx.Response:
    asked = {"model": "embedded", "input": "hi", "max_output_tokens": 4, "store": True}
    return ask(scene, key, "/v1/responses", {**asked, **more})


def questions(scene: "Ingress", key: str, name: str) -> list[httpx.Response]:
    """Everything that names a stored response."""
    return [
        ask(scene, key, f"/v1/responses/{name}", method="GET"),
        ask(scene, key, f"/v1/responses/{name}?stream=true", method="GET"),
        ask(scene, key, f"/v1/responses/{name}/cancel", {}),
        made(scene, key, previous_response_id=name),
        made(scene, key, previous_response_id=name, stream=True),
    ]


def test_another_tenants_response_does_not_exist(scene: "Ingress") -> None:
    name = made(scene, OWN).json()["id"]
    assert ask(scene, OWN, f"/v1/responses/{name}", method="GET").json()["id"] == name
    assert made(scene, OWN, previous_response_id=name).status_code == 200
    found, unknown = questions(scene, OTHER, name), questions(scene, OTHER, UNKNOWN)
    assert [answer.status_code for answer in found] == [404] * 5
    assert [answer.text.replace(name, UNKNOWN) for answer in found] == [answer.text for answer in unknown]


def test_an_id_that_two_tenants_choose_names_two_responses(scene: "Ingress") -> None:
    """A client may choose the id of its request, which is the response's."""
    for key, said in ((OWN, "mine"), (OTHER, "theirs")):
        assert made(scene, key, request_id="resp_same", instructions=said).status_code == 200
    told = [ask(scene, key, "/v1/responses/resp_same", method="GET").json() for key in (OWN, OTHER)]
    assert [each["instructions"] for each in told] == ["mine", "theirs"]


def test_a_stream_is_stored_for_its_tenant(scene: "Ingress") -> None:
    assert made(scene, OWN, request_id="resp_streamed", stream=True).status_code == 200
    found = [ask(scene, key, "/v1/responses/resp_streamed", method="GET").status_code for key in (OWN, OTHER)]
    assert found == [200, 404]


def status(scene: "Ingress", key: str, name: str) -> int:
    return ask(scene, key, f"/v1/responses/{name}", method="GET").status_code


def test_the_latest_are_kept_and_whoever_has_most_loses_the_oldest(scene: "Ingress") -> None:
    assert made(scene, OTHER, request_id="resp_others").status_code == 200
    names = [f"resp_own{turn}" for turn in range(2 * MOST)]
    for turn, name in enumerate(names):
        assert made(scene, OWN, request_id=name, stream=turn % 2 == 0).status_code == 200
    found = [status(scene, OWN, name) for name in names]
    kept = found.count(200)
    assert 0 < kept < MOST, "another key has at least one"
    assert found == [404] * (len(names) - kept) + [200] * kept
    assert status(scene, OTHER, "resp_others") == 200
    assert made(scene, OWN, previous_response_id=names[0]).status_code == 404
    assert made(scene, OWN, previous_response_id=names[-1]).status_code == 200


def test_nothing_of_what_is_forgotten_or_failed_stays_in_memory(scene: "Ingress") -> None:
    responses = scene.server_state.openai_serving_responses
    for turn in range(2 * MOST):
        assert made(scene, OWN, stream=turn % 2 == 0).status_code == 200
    from tests.support.ingress_scene import refused

    scene.transport.decide = refused
    refusals = [made(scene, OWN, request_id="resp_refused", stream=stream) for stream in (False, True)]
    assert [refusal.status_code for refusal in refusals] == [429, 429]
    assert status(scene, OWN, "resp_refused") == 404, "it was there, as one that is completed and says nothing"
    scene.reset()
    token = current_tenant.set(tenant_by(OWN))
    try:
        kept = {name: list(getattr(responses, name)) for name in ("response_store", "msg_store")}
    finally:
        current_tenant.reset(token)
    assert 0 < len(kept["response_store"]) <= MOST
    assert kept["msg_store"] == kept["response_store"]
