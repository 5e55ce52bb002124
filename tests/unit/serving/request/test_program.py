"""Which program a request names, and every way of naming it badly."""

import math
from typing import Any

import pytest

from protocol.programs import Program
from serving.request.program import read_program
from serving.request.slo import SloError


def body(**program: Any) -> dict[str, Any]:
    return {"slo": {"program": program}}


def test_no_program() -> None:
    assert read_program({"x-slo-ttft-ms": "5"}, {"slo": {"ttft_ms": 3}}) is None
    assert read_program({}, {"slo": {"program": None}}) is None


def test_headers_count_before_the_body() -> None:
    headers = {"X-Program-Id": " task-1 ", "x-program-deadline-ms": "2500", "x-session-id": "s"}
    told = body(id="other", deadline_ms=9, stage=2, parents=["a", "b"], app="agent")
    assert read_program(headers, told) == Program("task-1", 2.5, "2", ("a", "b"), "agent")


def test_body_alone() -> None:
    assert read_program({}, body(id="t", deadline_ms=1500, stage="plan")) == Program("t", 1.5, "plan")


@pytest.mark.parametrize("header", ["x-session-id", "x-claude-code-session-id"])
def test_session_is_a_program_without_deadline(header: str) -> None:
    assert read_program({header: "abc"}, {}) == Program("abc", math.inf, is_session=True)


def test_tools_model_and_the_end_are_told() -> None:
    told = body(id="t", tools=["search", "shell"], model="coder", last=True)
    assert read_program({}, told | {"model": "m"}) == Program(
        "t", tools=("search", "shell"), model="coder", is_last=True
    )
    found = read_program({"x-program-id": "t"}, {"model": "m"})
    assert found == Program("t", model="m")
    assert read_program({"x-program-id": "t"}, {"model": 5}) == Program("t"), "vLLM's server says what is wrong"


@pytest.mark.parametrize(
    ("headers", "told", "field"),
    [
        ({"x-program-deadline-ms": "100"}, {}, "x-program-deadline-ms"),
        ({}, body(stage="plan"), "slo.program"),
        ({"x-program-id": ""}, {}, "x-program-id"),
        ({"x-program-id": "a\x00b"}, {}, "x-program-id"),
        ({"x-program-id": "a" * 257}, {}, "x-program-id"),
        ({"x-program-id": "a", "x-program-deadline-ms": "-1"}, {}, "x-program-deadline-ms"),
        ({"x-program-id": "a", "x-program-deadline-ms": "nan"}, {}, "x-program-deadline-ms"),
        ({"x-program-id": "a"}, body(deadline_ms=0), "slo.program.deadline_ms"),
        ({"x-program-id": "a"}, body(deadline="9"), "slo.program.deadline"),
        ({"x-program-id": "a"}, body(parents="b"), "slo.program.parents"),
        ({"x-program-id": "a"}, body(parents=["b", None]), "slo.program.parents.1"),
        ({"x-program-id": "a"}, body(app=True), "slo.program.app"),
        ({"x-program-id": "a"}, body(id={}), "slo.program.id"),
        ({"x-program-id": "a"}, {"slo": {"program": "a"}}, "slo.program"),
    ],
)
def test_mistake_names_the_field(headers: dict[str, str], told: dict[str, Any], field: str) -> None:
    with pytest.raises(SloError) as error:
        read_program(headers, told)
    assert error.value.field == field
