"""Which program (the graph of sub-requests of one task) a request belongs to, and what its client is told of that.

Pure, as ``serving.request.slo``.

The id comes from ``x-program-id``, ``slo.program.id``, ``x-session-id`` or ``x-claude-code-session-id``, the deadline
from ``x-program-deadline-ms`` or ``slo.program.deadline_ms``; the first present counts, all must be well formed. The
model is the body's own, unless ``slo.program.model`` names what the client calls it.
"""

from collections.abc import Mapping
from typing import Any

from protocol.programs import INF, Program, StageGiven
from serving.request.slo import Asked, Headers, SloError, figure, milliseconds, section, shown

_KEYS = ("id", "deadline_ms", "stage", "parents", "app", "tools", "model", "last")
_LONGEST, _MOST_NAMES = 256, 256


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
    named = [text(value, field) for field, value in ids.items() if value is not None]
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
        _optional(told, "stage"),
        _names(told.get("parents"), "slo.program.parents"),
        _optional(told, "app"),
        _names(told.get("tools"), "slo.program.tools"),
        _optional(told, "model") or _model(body),
        _flag(told.get("last"), "slo.program.last"),
        is_session=ids["x-program-id"] is None and ids["slo.program.id"] is None,
    )


def part_object(program: Program | None, stage: StageGiven | None) -> dict[str, Any]:
    """What a client is told of a request as a part of its program; nothing where it is none."""
    if program is None or stage is None:
        return {}
    told = {
        "id": program.id,
        "stage": stage.stage,
        "stages_expected": round(stage.stages, 1),
        "stage_deadline_ms": milliseconds(stage.e2e_s),
        "left_ms": milliseconds(stage.left_s),
        "similarity": round(stage.similarity, 3),
        "promised": stage.is_promised,
    }
    return {"program": told}


def _model(body: Mapping[str, Any]) -> str:
    """The model that the body names, where that is a name; vLLM's server says itself what is wrong with it."""
    model = body.get("model")
    return model if isinstance(model, str) and model.isprintable() and len(model) <= _LONGEST else ""


def _optional(told: Mapping[str, Any], key: str) -> str:
    return text(told[key], f"slo.program.{key}") if told.get(key) is not None else ""


def _flag(value: Any, field: str) -> bool:
    if value is None or isinstance(value, bool):
        return bool(value)
    raise SloError(field, f"must be true or false, got {shown(value)}")


def text(value: Any, field: str) -> str:
    """A short printable string; a number (a stage's position) is taken as its digits."""
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if not isinstance(text, str) or not text.isprintable() or not 0 < len(text.strip()) <= _LONGEST:
        raise SloError(field, f"must be a printable string of 1 to {_LONGEST} characters, got {shown(value)}")
    return text.strip()


def _names(value: Any, field: str) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > _MOST_NAMES:
        raise SloError(field, f"must be a list of at most {_MOST_NAMES} names, got {shown(value)}")
    return tuple(text(each, f"{field}.{position}") for position, each in enumerate(value))
