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
