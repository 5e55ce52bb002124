"""Names that clients give in headers, whatever their letters."""

import dataclasses
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.ingress_scene import Ingress

MODEL = "embedded"


def test_a_name_in_a_header_is_the_name_in_a_body(ingress: "Ingress", monkeypatch: pytest.MonkeyPatch) -> None:
    """Headers were read as Latin-1 alone: a name of other letters was another one, or unknown."""
    index = dataclasses.replace(ingress.ingress_app.index(), aliases={"schnéll": "interactive"})
    monkeypatch.setattr(ingress.ingress_app, "_index", index)
    asked = {"model": MODEL, "prompt": "hi", "max_tokens": 4}
    ways: list[tuple[dict[str, object], list[tuple[bytes, bytes]]]] = [
        ({"slo": {"tier": "schnéll", "app": "Übung", "program": {"id": "grün"}}}, [])
    ]
    for encoding in ("utf-8", "latin-1"):
        told = {"x-slo-tier": "schnéll", "x-slo-app": "Übung", "x-program-id": "grün"}
        ways.append(({}, [(name.encode(), value.encode(encoding)) for name, value in told.items()]))
    for body, headers in ways:
        answer = ingress.post("/v1/completions", {**asked, **body}, headers)
        assert (answer.status_code, answer.json()["slo"]["tier"]) == (200, "interactive")
    for ask in ingress.transport.admissions:
        assert ask.program is not None
        assert (ask.traits.app, ask.program.id) == ("Übung", "grün")
