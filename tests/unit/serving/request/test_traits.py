"""What a client says about the length of its output."""

from typing import Any

import pytest

from protocol.messages import Traits
from serving.request.program import Program
from serving.request.slo import SloError
from serving.request.traits import read_traits


@pytest.mark.parametrize(
    ("headers", "slo", "found"),
    [
        ({}, {}, Traits()),
        ({"x-slo-app": "coder", "x-slo-output-tokens": "40"}, {}, Traits("coder", "", 40)),
        ({}, {"app": "coder", "output_tokens": 40}, Traits("coder", "", 40)),
        ({"x-slo-app": "a"}, {"app": "b", "output_tokens": 7}, Traits("a", "", 7)),
    ],
)
def test_headers_and_body_say_the_same(headers: dict[str, str], slo: dict[str, Any], found: Traits) -> None:
    assert read_traits(headers, {"slo": slo}, None) == found


def test_a_program_names_the_application_of_its_requests() -> None:
    assert read_traits({}, {}, Program("p", app="coder")) == Traits("coder", "p")
    assert read_traits({"x-slo-app": "own"}, {}, Program("p", app="coder")).app == "own"


@pytest.mark.parametrize("value", ["-1", "0", "x", "1e3", "99999999999", "٣"])
def test_a_hint_that_is_no_number_of_tokens_is_refused(value: str) -> None:
    with pytest.raises(SloError, match="x-slo-output-tokens"):
        read_traits({"x-slo-output-tokens": value}, {}, None)


@pytest.mark.parametrize("value", [True, 0, 1.5, "12", 10**8])
def test_the_same_in_the_body(value: object) -> None:
    with pytest.raises(SloError, match=r"slo\.output_tokens"):
        read_traits({}, {"slo": {"output_tokens": value}}, None)


@pytest.mark.parametrize("told", ["9" * 13, "9" * 5000, "-1", "1.5", "\u00b2", ""])
def test_a_length_that_is_no_number_of_tokens_is_named(told: str) -> None:
    """Python converts no more than 4,300 digits."""
    with pytest.raises(SloError, match="whole number of tokens"):
        read_traits({"x-slo-output-tokens": told}, {}, None)
