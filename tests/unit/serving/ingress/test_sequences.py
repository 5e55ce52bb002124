"""Counting the sequences that a body asks for."""

from typing import Any

import pytest

from serving.config.limits import LimitsConfig
from serving.ingress.limits import check_document
from serving.ingress.sequences import expected_sequences
from serving.request.slo import SloError

HELLO = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"prompt": "one"}, 1),
        ({"prompt": ["one", "two"], "n": 3}, 6),
        ({"prompt": [1, 2, 3]}, 1),
        ({"prompt": [[1, 2], [3]]}, 2),
        ({"messages": HELLO, "n": 4}, 4),
        ({"messages": [HELLO, HELLO]}, 2),
        ({"messages": HELLO, "n": 4, "use_beam_search": True}, 0),
        ({"prompt": [], "n": "many"}, 1),
        ({"input": "responses"}, 1),
    ],
)
def test_sequences_of_a_body(body: dict[str, Any], expected: int) -> None:
    assert expected_sequences(body) == expected


def test_as_many_sequences_as_the_limit_are_taken_and_no_more() -> None:
    limits = LimitsConfig(sequences=6)
    check_document({"prompt": ["a", "b"], "n": 3}, limits)
    with pytest.raises(SloError, match="7 sequences"):
        check_document({"prompt": "a", "n": 7}, limits)


@pytest.mark.parametrize("n", ["200", 200.0, True, [200]])
def test_a_number_of_sequences_that_vllm_would_convert_is_refused(n: object) -> None:
    with pytest.raises(SloError, match="n: must be a whole number, got"):
        check_document({"prompt": "a", "n": n}, LimitsConfig())


@pytest.mark.parametrize("background", [True, "true", "1", 1, []])
def test_a_background_response_is_refused_however_it_is_asked_for(background: object) -> None:
    check_document({"input": "a", "background": False}, LimitsConfig())
    check_document({"input": "a", "background": None, "n": None}, LimitsConfig())
    with pytest.raises(SloError, match="background: is not supported"):
        check_document({"input": "a", "background": background}, LimitsConfig())
