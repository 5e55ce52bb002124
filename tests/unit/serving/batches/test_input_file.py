"""What is wrong with a batch's input file, and in which line."""

import pytest

from serving.batches.input_file import MOST_ERRORS, check, numbered, read_line
from serving.batches.objects import LineError
from serving.config.batches import BatchOptions
from tests.support.batches_scene import CHAT, COMPLETIONS, jsonl, line

OPTIONS = BatchOptions("/x", most_requests=200, line_bytes=1000)


def mistakes(content: bytes) -> list[LineError]:
    return check(content.split(b"\n"), COMPLETIONS, OPTIONS).errors


@pytest.mark.parametrize(
    ("content", "code", "param"),
    [
        (b"", "empty_file", None),
        (b"\n \n", "empty_file", None),
        (b"{", "invalid_json_line", None),
        (b"[]", "invalid_json_line", None),
        (b"\xff", "invalid_json_line", None),
        (b"[" * 100_000, "request_too_large", None),
        (b'{"custom_id": "a", "method": "POST", "url": "/v1/completions"}', "invalid_json_line", None),
        (b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": 1}', "invalid_json_line", None),
        (b'{"custom_id": 1, "method": "POST", "url": "/v1/completions", "body": {}}', "invalid_json_line", None),
        (jsonl(line("")), "invalid_value", "custom_id"),
        (jsonl(line("a", CHAT)), "invalid_value", "url"),
        (jsonl(line("a", method="GET")), "invalid_value", "method"),
        (jsonl(line("a", stream=True)), "invalid_value", "body.stream"),
        (jsonl(line("a", prompt="x" * 1000)), "request_too_large", None),
    ],
)
def test_a_mistake_is_named(content: bytes, code: str, param: str | None) -> None:
    (error,) = mistakes(content)
    assert (error.code, error.param) == (code, param)


def test_the_line_is_told_and_errors_are_bounded() -> None:
    content = b"\n" + jsonl(line("a"), line("b"), line("a"))
    (error,) = mistakes(content)
    assert (error.code, error.line) == ("duplicate_custom_id", 4)
    assert len(mistakes(b"{\n" * (MOST_ERRORS + 20))) == MOST_ERRORS
    (error,) = mistakes(b"{\n" * 201)
    assert error.code == "too_many_requests"


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
def test_sound_lines_are_read_again(end: bytes) -> None:
    content = jsonl(line("a"), line("b")).strip() + end
    assert check(content.split(b"\n"), COMPLETIONS, OPTIONS) == (2, [])
    found = list(numbered(content.split(b"\n")))
    assert [read_line(content[place.begin : place.end]).custom_id for place, _ in found] == ["a", "b"]
    assert [read_line(each).custom_id for _, each in found] == ["a", "b"]
