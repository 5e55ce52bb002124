"""The lines of a batch's input file: checked once, all of them, before any is served. Pure."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import msgspec

from serving.batches.objects import LineError
from serving.config.batches import BatchOptions

MOST_ERRORS = 100  # that are told
LONGEST_ID = 512


class InputLine(msgspec.Struct):
    """One line, as the client wrote it."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Body(msgspec.Struct):
    stream: Any = None


class Place(NamedTuple):
    """Where a request is in its file: the line's number, from 1, and its bytes."""

    number: int
    begin: int
    end: int


_line = msgspec.json.Decoder(InputLine)
_body = msgspec.json.Decoder(_Body)


class Checked(NamedTuple):
    """How many requests a file has, and what is wrong with them; nothing where all can be served."""

    requests: int
    errors: list[LineError]


def numbered(lines: Iterable[bytes]) -> Iterator[tuple[Place, bytes]]:
    """Of a file's lines, without their ends, those that are not empty."""
    begin = 0
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield Place(number, begin, begin + len(line)), line
        begin += len(line) + 1


def read_line(line: bytes) -> InputLine:
    """A line that ``check`` has found sound."""
    return _line.decode(line)


def check(lines: Iterable[bytes], endpoint: str, options: BatchOptions) -> Checked:
    """Look at all lines of a file, which are without their ends."""
    errors, ids, count = list[LineError](), set[str](), 0
    for place, line in numbered(lines):
        count += 1
        if count > options.most_requests:
            told = f"The file has more than {options.most_requests} requests."
            return Checked(count, [LineError("too_many_requests", told, place.number)])
        error = _mistake(line, place.number, endpoint, options, ids)
        if error is not None and len(errors) < MOST_ERRORS:
            errors.append(error)
    return Checked(count, errors if count else [LineError("empty_file", "The file has no request.")])


def _mistake(content: bytes, number: int, endpoint: str, options: BatchOptions, ids: set[str]) -> LineError | None:
    if len(content) > options.line_bytes:
        return LineError("request_too_large", f"The line has more than {options.line_bytes} bytes.", number)
    try:
        line = read_line(content)
        body = _body.decode(line.body)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        told = f"Each line needs a JSON object with custom_id, method, url and body: {error}"
        return LineError("invalid_json_line", told, number)
    for param, is_wrong, message in (
        ("custom_id", not 0 < len(line.custom_id) <= LONGEST_ID, f"must have 1 to {LONGEST_ID} characters"),
        ("custom_id", line.custom_id in ids, "is used twice in the file"),
        ("method", line.method != "POST", "must be POST"),
        ("url", line.url != endpoint, f"must be the endpoint of the batch, {endpoint}"),
        ("body.stream", body.stream not in (None, False), "must be false: a batch has no stream"),
    ):
        if is_wrong:
            code = "duplicate_custom_id" if "twice" in message else "invalid_value"
            return LineError(code, f"{param} {message}.", number, param)
    ids.add(line.custom_id)
    return None
