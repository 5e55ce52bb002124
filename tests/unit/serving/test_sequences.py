"""Counting the sequences that a body asks for."""

from typing import Any

import pytest

from serving.sequences import expected_sequences

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
