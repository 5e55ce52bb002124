"""Errors as OpenAI's clients know them (or Anthropic's, on its paths): a status, the keys, when to come back."""

import math
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from protocol.messages import Decision
from serving.request.trail import LAST_EVENT_ID

RETRY_AFTER_CAP_S = 30
AGAIN_S = 5  # after which to ask again where nobody knows how long it takes: a replica starts, or a keeper of batches
ANTHROPIC = "/v1/messages"  # this path, and what is below it
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}
NO_REPLICA = "no_replica"  # the controller's reason when nothing lives that could serve


@dataclass(frozen=True)
class ApiError:
    """A complete error response but for its encoding."""

    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def event(self, number: int) -> dict[str, Any]:
        """The same as the event ``error`` of a stream of the Responses API, of which it is the event ``number``."""
        told = {"code": self.type, "message": self.message, "param": self.param}
        return {"type": "error", **told, "sequence_number": number}

    def body_for(self, path: str) -> dict[str, Any]:
        """The body as clients of ``path`` read it."""
        return anthropic_error(self.status, self.message) if is_anthropic(path) else self.body


def is_anthropic(path: str) -> bool:
    """Whether clients of ``path`` expect Anthropic's shapes."""
    return path == ANTHROPIC or path.startswith(f"{ANTHROPIC}/")


def anthropic_error(status: int, message: str) -> dict[str, Any]:
    """An error as the Messages API shapes it; a status without a name of its own counts as its class."""
    kind = _ANTHROPIC_TYPES.get(status) or ("invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def bad_request(message: str, param: str | None = None) -> ApiError:
    """400: the client's mistake, in the field ``param``."""
    return ApiError(HTTPStatus.BAD_REQUEST, message, "invalid_request_error", param, "invalid_value")


def unavailable(message: str, reason: str = NO_REPLICA, again_s: float = 0.0) -> ApiError:
    """503: no live replica, or shutting down; to be asked again after ``again_s``, where that is known."""
    headers = {"x-slo-reason": reason, "retry-after": str(retry_after_s(again_s) or AGAIN_S)}
    return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, message, "service_unavailable_error", None, reason, headers)


def engine_failed(message: str = "The request failed before its first token.") -> ApiError:
    """500: an engine failed with the request, and no other could go on."""
    return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, message, "server_error", code="engine_error")


def overloaded(status: int, reason: str, message: str) -> ApiError:
    """The ingress itself has no room (503), or none for this client (429)."""
    kind = "rate_limit_error" if status == HTTPStatus.TOO_MANY_REQUESTS else "service_unavailable_error"
    return ApiError(status, message, kind, None, reason, {"x-slo-reason": reason, "retry-after": "1"})


def not_resumed(code: str, why: str) -> ApiError:
    """410: the rest of a stream cannot be had. Clients of OpenAI do not repeat a 410 by themselves."""
    message = f"This stream cannot be resumed: {why} Send the request again without last-event-id."
    return ApiError(HTTPStatus.GONE, message, "invalid_request_error", LAST_EVENT_ID, code)


def not_resumed_now() -> ApiError:
    """503: the replica that may have the rest of a stream does not answer. The same request may succeed later."""
    message = "The replica that made this stream does not answer. Send the same request again, with last-event-id."
    kind, code = "service_unavailable_error", "stream_unanswered"
    return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, message, kind, LAST_EVENT_ID, code, {"retry-after": "1"})


def refused(decision: Decision, overload_status: int = HTTPStatus.TOO_MANY_REQUESTS) -> ApiError:
    """The controller's refusal: ``overload_status`` with the reason, and when the objective will be attainable."""
    if decision.reason == NO_REPLICA:
        return unavailable("No replica is alive to serve this request.", again_s=decision.retry_after_s)
    headers = {"x-slo-reason": decision.reason, "x-slo-tier": decision.tier}
    message = f"Tier {decision.tier!r} cannot hold this request's objective ({decision.reason})."
    message += _left(decision)
    wait_s = retry_after_s(decision.retry_after_s)
    if wait_s is None:
        message += f"{_at_best(decision)} No time is known at which it could: allow more time or send less."
    else:
        headers["retry-after"] = str(wait_s)
        message += f" Try again in {wait_s} s."
    return ApiError(overload_status, message, "rate_limit_error", None, decision.reason, headers)


def _left(decision: Decision) -> str:
    """What a call of a program had: a client that states what is left, not the whole deadline, sees it here."""
    left_s = decision.stage.left_s if decision.stage is not None else math.inf
    if not math.isfinite(left_s):
        return ""
    left_ms = _milliseconds(max(0.0, left_s))
    return f" Of its program's deadline, which counts from the first call, {left_ms} ms are left."


def _at_best(decision: Decision) -> str:
    """What a replica that has nothing else to do would need for a request that none can attain."""
    told = []
    if math.isfinite(decision.predicted_ttft_s):
        told.append(f"{_milliseconds(decision.predicted_ttft_s)} ms for the first token")
    if math.isfinite(decision.predicted_tpot_s) and decision.predicted_tpot_s > 0:
        told.append(f"{_milliseconds(decision.predicted_tpot_s)} ms for each further one")
    return f" An idle replica would need about {' and '.join(told)}." if told else ""


def _milliseconds(seconds: float) -> str:
    """Three digits are enough."""
    return f"{float(f'{1e3 * seconds:.3g}'):g}"


def retry_after_s(seconds: float) -> int | None:
    """``Retry-After``: whole seconds rounded up, 1 to 30; None where the controller says 0, that it will never be."""
    return max(1, math.ceil(min(seconds, RETRY_AFTER_CAP_S))) if seconds > 0 else None
