"""Which program (the graph of sub-requests of one task) a request belongs to. Pure, as ``serving.request.slo``.

The id comes from ``x-program-id``, ``slo.program.id``, ``x-session-id`` or ``x-claude-code-session-id``, the deadline
from ``x-program-deadline-ms`` or ``slo.program.deadline_ms``; the first present counts, all must be well formed.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from protocol.messages import INF
from serving.request.slo import Asked, Headers, SloError, figure, section, shown

_KEYS = ("id", "deadline_ms", "stage", "parents", "app")
_LONGEST, _MOST_PARENTS = 256, 256


class Program(msgspec.Struct, frozen=True):
    """A task whose sub-requests share a deadline, which counts from the first one's arrival."""

    id: str
    deadline_s: float = INF
    stage: str = ""
    parents: tuple[str, ...] = ()
    app: str = ""


def read_program(headers: Headers, body: Mapping[str, Any]) -> Program | None:
    """The program of a request, None where it names none; raises ``SloError``."""
    asked = Asked(headers, body)
    told = section(asked.slo.get("program"), "slo.program", _KEYS)
    ids = {
        "x-program-id": asked.header("x-program-id"),
        "slo.program.id": told.get("id"),
        "x-session-id": asked.header("x-session-id"),
        "x-claude-code-session-id": asked.header("x-claude-code-session-id"),
    }
    named = [_text(value, field) for field, value in ids.items() if value is not None]
    in_header = asked.header_bound("x-program-deadline-ms")
    in_body = figure(told.get("deadline_ms"), "slo.program.deadline_ms", "milliseconds")
    deadline = in_header or in_body
    if not named:
        if deadline is not None or told:
            field = deadline.field if deadline is not None else "slo.program"
            raise SloError(field, "belongs to a program, but no x-program-id or slo.program.id names it")
        return None
    return Program(
        named[0],
        deadline.seconds if deadline is not None else INF,
        _text(told["stage"], "slo.program.stage") if told.get("stage") is not None else "",
        _parents(told.get("parents")),
        _text(told["app"], "slo.program.app") if told.get("app") is not None else "",
    )


def _text(value: Any, field: str) -> str:
    """A short printable string; a number (a stage's position) is taken as its digits."""
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if not isinstance(text, str) or not text.isprintable() or not 0 < len(text.strip()) <= _LONGEST:
        raise SloError(field, f"must be a printable string of 1 to {_LONGEST} characters, got {shown(value)}")
    return text.strip()


def _parents(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > _MOST_PARENTS:
        raise SloError("slo.program.parents", f"must be a list of at most {_MOST_PARENTS} ids, got {shown(value)}")
    return tuple(_text(each, f"slo.program.parents.{position}") for position, each in enumerate(value))
