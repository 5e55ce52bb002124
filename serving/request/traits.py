"""What the length of a request's output may depend on, from its headers and body. Pure, as ``serving.request.slo``.

The application or task comes from ``x-slo-app``, ``slo.app`` or ``slo.program.app``; the length that the client expects
from ``x-slo-output-tokens`` or ``slo.output_tokens``. The first present counts, all must be well formed.
"""

import re
from collections.abc import Mapping
from typing import Any

from protocol.messages import Traits
from serving.request.program import Program, text
from serving.request.slo import Asked, Headers, SloError, shown

MOST_TOKENS = 10_000_000  # more than any model's context
NUMBER = re.compile(r"[0-9]{1,12}")


def read_traits(headers: Headers, body: Mapping[str, Any], program: Program | None) -> Traits:
    """The traits of a request as its client names them; raises ``SloError``."""
    asked = Asked(headers, body)
    apps = {"x-slo-app": asked.header("x-slo-app"), "slo.app": asked.slo.get("app")}
    named = [text(value, field) for field, value in apps.items() if value is not None]
    named += [program.app] if program is not None and program.app else []
    header = asked.header("x-slo-output-tokens")
    hints = {
        "x-slo-output-tokens": int(header) if header and NUMBER.fullmatch(header) else header,
        "slo.output_tokens": asked.slo.get("output_tokens"),
    }
    hinted = [_tokens(value, field) for field, value in hints.items() if value is not None]
    return Traits(named[0] if named else "", program.id if program is not None else "", hinted[0] if hinted else 0)


def _tokens(value: Any, field: str) -> int:
    """A whole number of tokens."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= MOST_TOKENS:
        raise SloError(field, f"must be a whole number of tokens from 1 to {MOST_TOKENS}, got {shown(value)}")
    return value
