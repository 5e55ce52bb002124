"""An application below a ``route_prefix``: objectives, health and status are found there."""

from typing import Any

import pytest

from replicas.config import controller_name
from tests.support.ingress_scene import MODEL, Ingress

pytest.importorskip("ray")
from serving.ingress.ingress import within_prefix


def below(root: str, path: str) -> tuple[str, str]:
    found = within_prefix({"type": "http", "root_path": root, "path": path})
    return found["root_path"], found["path"]


def test_paths_are_below_the_prefix() -> None:
    assert below("", "/v1/completions") == ("", "/v1/completions")
    assert below("/llm", "/llm/v1/completions") == ("/llm", "/v1/completions")
    assert below("/llm/", "/llm") == ("/llm", "/")
    assert below("/llm", "/llmx/v1") == ("/llm", "/llmx/v1"), "another path"
    assert below("/v1", "/v1/v1/completions") == ("", "/v1/completions"), "not taken off twice"
    assert within_prefix({"type": "lifespan"}) == {"type": "lifespan"}


@pytest.mark.parametrize("root", ["", "/llm"])
def test_objectives_hold_below_a_route_prefix(ingress: Ingress, root: str) -> None:
    answers = [
        prefixed(ingress, root, "POST", "/v1/completions", {"model": MODEL, "prompt": "hi", "max_tokens": 6}),
        prefixed(ingress, root, "GET", "/polyslo/status"),
        prefixed(ingress, root, "GET", "/health"),
    ]
    assert [answer.status_code for answer in answers] == [200, 200, 200]
    assert answers[0].json()["slo"]["tier"] == "standard"
    (ask,) = ingress.transport.admissions
    assert ask.slo.ttft_s == 2.0
    assert answers[1].json()["replicas"]
    assert answers[2].json() == {"status": "ok"}


def prefixed(ingress: Ingress, root: str, method: str, path: str, body: Any = None) -> Any:
    """One request through Serve's proxy, which leaves the prefix in the path and names it in ``root_path``."""
    inner = ingress.ingress_app

    async def ingress_app(scope: Any, receive: Any, send: Any) -> None:
        await inner({**scope, "root_path": root}, receive, send)

    ingress.ingress_app = ingress_app  # type: ignore[assignment]
    try:
        return ingress.run(ingress.ask(f"{root}{path}", body, method=method))
    finally:
        ingress.ingress_app = inner


def test_every_application_has_its_own_controller() -> None:
    assert controller_name("polyslo-controller-{application}", "chat") == "polyslo-controller-chat"
    assert controller_name("mine", "chat") == "mine"
    assert controller_name("", "chat") == ""
