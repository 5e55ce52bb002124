"""Why an application did not start, in one line."""

import pytest

from serving.launch.launch import last_line

TRACEBACK = "Traceback (most recent call last):\n  File a, line 1, in b\n"
VALIDATION = """pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig
  Value error, Number of experts must be greater than 0. [type=value_error, input_value=ArgsKwargs((), {})]
    For further information visit https://errors.pydantic.dev/2.12/v/value_error
"""


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (TRACEBACK + "ValueError: no room\nThe deployment failed 3 times.", "ValueError: no room"),
        (TRACEBACK + VALIDATION, "Number of experts must be greater than 0."),
        (VALIDATION.splitlines()[0], VALIDATION.splitlines()[0]),
        ("It was not healthy.", "It was not healthy."),
        ("", "no reason given"),
    ],
)
def test_the_reason_is_the_last_error_of_a_traceback(message: str, told: str) -> None:
    assert last_line({"message": "", "deployments": {"Replica": {"message": message}}}) == told
