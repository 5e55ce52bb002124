"""Stored responses belong to the tenant that made them: for any other they do not exist."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx
import pytest

pytest.importorskip("ray")
pytest.importorskip("vllm")

if TYPE_CHECKING:
    from tests.support.ingress_scene import Ingress

OWN, OTHER = "own", "other"
UNKNOWN = "resp_none"


@pytest.fixture(scope="module")
def scene() -> "Iterator[Ingress]":
    from tests.support.ingress_scene import Ingress

    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("VLLM_ENABLE_RESPONSES_API_STORE", "1")
        with Ingress(model={"id": "embedded", "server_kwargs": {"api_key": [OWN, OTHER]}}) as made:
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
