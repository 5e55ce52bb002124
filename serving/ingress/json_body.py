"""Reads JSON request bodies strictly, and names the place of what no engine could be sent. Pure; no HTTP types.

Refused: what is not JSON by RFC 8259 (also NaN, Infinity and what is not UTF-8), lone surrogates in keys or strings,
integers beyond 64 bits, nesting and numbers of values beyond the limits.
"""

import json
import math
import re
from typing import Any

import msgspec

from serving.request.slo import SloError

_LONG_INTEGER = re.compile(rb"\d{19}")
# Takes time in proportion to the body, also where a string does not end: nothing is tried twice.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
_LEAST, _MOST = -(1 << 63), (1 << 64) - 1  # what msgpack, and with it the way to an engine, can hold
_BODY = "body"
_CONTAINER = 10  # values that an object or a list counts as

Path = tuple[Any, ...]  # (path of the parent, key); empty for the document itself


def read_json(body: bytes, most_values: int, most_depth: int) -> Any:
    """The document in ``body``.

    Args:
        most_values: of them, an object or a list counting as ten: so much longer it takes to make.
        most_depth: of nested objects and lists.

    Raises:
        SloError: naming the field, ``body`` where that is all of it.
    """
    if _marks(body) > most_values and _marks(_STRING.sub(b"", body)) > most_values:
        raise SloError(_BODY, f"has more than {most_values} values")
    try:
        document = msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise _explained(body, error, most_depth) from None
    _check_depth(document, most_depth)
    if _LONG_INTEGER.search(body) and _LONG_INTEGER.search(_STRING.sub(b"", body)):
        _check_leaves((), document)
    return document


def _marks(body: bytes) -> int:
    """An upper bound of the number of values, weighted: text may have such characters, too."""
    return body.count(b",") + _CONTAINER * (body.count(b"[") + body.count(b"{"))


def _explained(body: bytes, error: Exception, most_depth: int) -> SloError:
    """What is wrong with a body that does not parse, with the field where one is at fault."""
    try:
        document = json.loads(body.decode())  # lenient: takes lone surrogates and infinite numbers, to be found below
        _check_depth(document, most_depth)
        _check_leaves((), document)
    except SloError as found:
        return found
    except UnicodeDecodeError:
        return SloError(_BODY, "is not UTF-8")
    except RecursionError:
        return SloError(_BODY, f"is nested deeper than {most_depth} levels")
    except json.JSONDecodeError as found:
        return SloError(_BODY, f"is not JSON: {found.msg} at character {found.pos}")
    except ValueError:  # more digits than Python converts
        return SloError(_BODY, "has an integer beyond 64 bits")
    return SloError(_BODY, f"is not JSON: {error}")


def _check_depth(document: Any, most_depth: int) -> None:
    """Level by level, because the stack of Python is not as deep as what a client may send."""
    level = [document]
    for _ in range(most_depth):
        level = [
            child
            for value in level
            if isinstance(value, dict | list)
            for child in (value.values() if isinstance(value, dict) else value)
            if isinstance(child, dict | list)
        ]
        if not level:
            return
    raise SloError(_BODY, f"is nested deeper than {most_depth} levels")


def _check_leaves(path: Path, value: Any) -> None:
    """Raise ``SloError`` for the first leaf that cannot be sent; ``value`` is no deeper than the limit."""
    if isinstance(value, dict):
        for key, child in value.items():
            _check_leaf((path, key), key)
            _check_leaves((path, key), child)
    elif isinstance(value, list):
        for position, child in enumerate(value):
            _check_leaves((path, position), child)
    else:
        _check_leaf(path, value)


def _check_leaf(path: Path, value: Any) -> None:
    if isinstance(value, str):
        if not value.isascii() and _is_broken(value):
            raise SloError(_name(path), "has half a surrogate pair, which is no character")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise SloError(_name(path), "must be a finite number")
    elif isinstance(value, int) and not _LEAST <= value <= _MOST:
        raise SloError(_name(path), "is an integer beyond 64 bits")


def _is_broken(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _name(path: Path) -> str:
    """``a.0.b``; ``body`` for the document itself."""
    keys: list[str] = []
    while path:
        path, key = path
        keys.append(str(key)[:64])
    return ".".join(reversed(keys)) or _BODY
