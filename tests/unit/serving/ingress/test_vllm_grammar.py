"""Which grammars are compiled before they are sent to an engine: only those that may refer to themselves."""

import json
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

from serving.config.limits import LimitsConfig
from serving.ingress.limits import check_document
from serving.ingress.vllm_checks import check_grammar_size
from serving.ingress.vllm_grammar import may_recur, says_nothing
from serving.request.slo import SloError

CHOICES = " | ".join(json.dumps(f"{i} ::= root : $re") for i in range(5000))


def constraint(**kind: Any) -> StructuredOutputsParams:
    params = StructuredOutputsParams(**kind)
    params._backend = "xgrammar"
    return params


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (f"root ::= {CHOICES}", False),
        ('root ::= "a"', False),
        ('start: "a"', False),
        ("root ::= root", True),
        ('root ::= a\na ::= "b"', True),
        ('start: "a" start', True),
        (json.dumps({"enum": ["root ::= root"] * 1000}), False),
        (json.dumps({"$ref": "#"}), True),
        (json.dumps({"type": "object", "properties": {"a": {"type": "string"}}}), False),
    ],
    ids=lambda each: str(each)[:30],
)
def test_reference_to_itself(text: str, answer: bool) -> None:
    assert may_recur(text) is answer


@pytest.mark.parametrize("kind", [{"json": '{"$ref": "#"}'}, {"grammar": "root ::= root"}])
def test_grammar_without_beginning_says_nothing(kind: dict[str, str]) -> None:
    assert says_nothing(constraint(**kind))


def test_thousands_of_choices_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.ingress.vllm_grammar._compiler", lambda: pytest.fail("compiled"))
    assert not says_nothing(constraint(json=json.dumps({"enum": [str(i) * 20 for i in range(5000)]})))
    assert not says_nothing(constraint(grammar=f"root ::= {CHOICES}"))


@pytest.mark.parametrize("field", ["structured_outputs", "response_format", "text"])
def test_long_grammar_is_refused(field: str) -> None:
    limits = LimitsConfig(grammar_bytes=100)
    check_document({field: {"choice": ["a"]}}, limits)
    with pytest.raises(SloError, match=f"{field}: has .* bytes as JSON; at most 100") as error:
        check_document({field: {"choice": ["a" * 100]}}, limits)
    assert error.value.field == field


@pytest.mark.parametrize("value", [[], "a", 0, False])
def test_structured_outputs_are_an_object(value: Any) -> None:
    with pytest.raises(SloError, match="structured_outputs: must be an object"):
        check_document({"structured_outputs": value}, LimitsConfig())


def test_a_comment_hides_no_rule() -> None:
    assert may_recur('# 12" wide\nroot ::= root "a"')
    assert may_recur('# "\nroot ::= root "a"')
    assert not may_recur('# 12" wide\nroot ::= "a"')


@pytest.mark.parametrize(
    "text",
    [
        'root ::= "a"' + "\n" * 300_000,
        'root ::= # "' + '\\"' * 300_000,
        "root ::= " + "a" * 300_000 + "\n" + "b" * 300_000,
    ],
    ids=["lines", "literal", "names"],
)
def test_a_long_grammar_is_read_once(text: str) -> None:
    """Read again from each of its lines or quotes, it would take minutes, in which an ingress serves nobody."""
    assert not may_recur(text)


def test_what_vllm_makes_a_grammar_of_is_measured() -> None:
    check_grammar_size(StructuredOutputsParams(choice=["a"]), 100)
    with pytest.raises(VLLMValidationError, match="at most 100 are compiled"):
        check_grammar_size(StructuredOutputsParams(json={"enum": ["a" * 100]}), 100)
