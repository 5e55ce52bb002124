"""Adds ``service_tier`` and the ``slo`` object to responses and stream events of vLLM's server; mends its errors.

``service_tier`` has OpenAI's values, because typed clients reject others; the tier's own name is ``slo.tier``.
"""

import json
from http import HTTPStatus
from typing import Any

from protocol.messages import Verdict
from serving.ingress.errors import ApiError, anthropic_error, is_anthropic
from serving.request.state import HttpRequestState

_CODES = {401: "invalid_api_key", 404: "not_found"}  # of errors that have none
RESPONSES = "/v1/responses"
EVENT = b"data: {"
MIDDLE = EVENT + b'"id"'  # how those of completions and chats begin, errors not
CONVERTER_ERROR = "internal_error"  # of vLLM's messages API, which cannot read an error of the chat API below it
_NO_MODEL = "The model `"  # how vLLM's 404 about a model begins, some without ``param``
_FINAL_RESPONSE_EVENTS = (b"response.completed", b"response.incomplete", b"response.failed")


def openai_tier(request_state: HttpRequestState) -> str:
    """``flex`` for what is served best effort, ``priority`` where that was asked for and kept, else ``default``."""
    if request_state.slo.best_effort or any(
        decision.verdict != Verdict.ADMITTED for decision in request_state.decisions
    ):
        return "flex"
    return "priority" if request_state.service_tier == "priority" else "default"


def annotate_json(body: bytes, request_state: HttpRequestState) -> bytes:
    """A whole JSON response with the class that served it and its verdict."""
    document = _object(body)
    if document is None:
        return body
    document |= {"service_tier": openai_tier(request_state), "slo": request_state.slo_object()}
    return _encoded(document)


def mend_error(body: bytes, status: int, path: str) -> bytes:
    """A JSON error of vLLM's server or its web framework, shaped as clients of ``path`` read errors."""
    document = _object(body)
    if document is None:
        return body
    error = document.get("error")
    error = (
        error if isinstance(error, dict) else {"message": error or document.get("detail"), "code": _CODES.get(status)}
    )
    if is_anthropic(path):
        return _encoded(anthropic_error(status, str(error.get("message", ""))))
    told = openai_error(error)
    if path == RESPONSES and told["param"] == "response_id":  # vLLM names what its own paths have
        told["param"] = "previous_response_id"
    return _encoded({"error": told})


def only_error(stream: bytes) -> tuple[int, bytes] | None:
    """Status and JSON document of a stream of events that is nothing but an error of vLLM's; else None."""
    event, _, rest = stream.partition(b"\n\n")
    payload = event.removeprefix(b"data: ")
    error = (_object(payload) or {}).get("error")
    code = error.get("code") if isinstance(error, dict) else None
    is_alone = rest.strip() in (b"", b"data: [DONE]")
    return (code, payload) if is_alone and isinstance(code, int) and 400 <= code < 600 else None


def _object(body: bytes) -> dict[str, Any] | None:
    """The JSON object in ``body``, None where it is something else."""
    try:
        document = json.loads(body)
    except ValueError:
        return None
    return document if isinstance(document, dict) else None


def _encoded(document: dict[str, Any]) -> bytes:
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode(errors="backslashreplace")


def openai_error(error: dict[str, Any]) -> dict[str, Any]:
    """vLLM's numeric ``code`` as the string (or null) that OpenAI's clients expect; all four keys present."""
    message, code = str(error.get("message", "")), error.get("code")
    if not isinstance(code, str):
        known = _missing(error, message) if code == HTTPStatus.NOT_FOUND else None
        code = "context_length_exceeded" if "maximum context length" in message else known
    return {
        "message": message,
        "type": error.get("type") or "invalid_request_error",
        "param": error.get("param"),
        "code": code,
    }


def _missing(error: dict[str, Any], message: str) -> str:
    """The code of a 404: its model, or something else that is not there (a stored response, a route)."""
    is_model = error.get("param") == "model" or message.startswith(_NO_MODEL)
    return "model_not_found" if is_model else "not_found"


class StreamAnnotator:
    """Annotates server-sent events one by one; bytes may arrive cut anywhere.

    A chunk in the middle of a completion or a chat, which is nearly all of them, is passed on unread, with
    ``service_tier`` in front.
    """

    def __init__(self, request_state: HttpRequestState) -> None:
        self.request_state, self._rest = request_state, b""
        self._front, self._decided_s = b"", -1.0  # of a middle chunk, and as of which decision
        self._named = 0  # events of the Responses API so far, which numbers its events

    def feed(self, data: bytes, last: bool) -> bytes:
        """Complete events of ``data``, annotated; the remainder waits for its end (or passes when ``last``)."""
        if is_middle(data) and not self._rest:
            if self._decided_s != self.request_state.decided_s:
                self._decided_s = self.request_state.decided_s
                tier = {"service_tier": openai_tier(self.request_state)}
                self._front = EVENT[:-1] + _front(tier) + b","
            return self._front + data[len(EVENT) :]
        events = (self._rest + data).split(b"\n\n")
        self._rest = b"" if last else events.pop()
        done = [self._annotate(event) for event in events]
        return b"\n\n".join(done) + (b"\n\n" if done and not last else b"")

    def failure(self, error: ApiError) -> bytes:
        """The last event of a stream of the Responses API that breaks off."""
        return b"event: error\ndata: " + _encoded(error.event(self._named)) + b"\n\n"

    def _annotate(self, event: bytes) -> bytes:
        head, mark, payload = event.partition(b"data: ")  # the first: the text in the payload may say it again
        if not mark or not payload.startswith(b"{"):
            return event
        if payload.startswith(b'{"error"'):
            document = json.loads(payload)
            return head + mark + json.dumps({"error": openai_error(document["error"])}).encode()
        if head.startswith(b"event: "):
            self._named += 1
            return head + mark + self._named_event(head, payload)
        extra: dict[str, Any] = {"service_tier": openai_tier(self.request_state)}
        if b'"finish_reason":"' in payload:
            extra["slo"] = self.request_state.slo_object()
        return head + mark + _prepend(extra, payload)

    def _named_event(self, head: bytes, payload: bytes) -> bytes:
        """Responses API events carry the response object; Anthropic's ``message_delta`` carries the stop reason."""
        if b'"response":' in payload and head.startswith(b"event: response."):
            document = json.loads(payload)
            if isinstance(document.get("response"), dict):
                document["response"]["service_tier"] = openai_tier(self.request_state)
                if head[7:].startswith(_FINAL_RESPONSE_EVENTS):
                    document["response"]["slo"] = self.request_state.slo_object()
            return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
        if head.startswith(b"event: message_delta"):
            return _prepend(
                {"service_tier": openai_tier(self.request_state), "slo": self.request_state.slo_object()}, payload
            )
        if (
            head.startswith(b"event: error")
            and (_object(payload) or {}).get("error", {}).get("type") == CONVERTER_ERROR
        ):
            return _encoded(anthropic_error(500, "Internal server error"))
        return payload


def is_middle(data: bytes) -> bool:
    """Whether this is one whole event of a completion or a chat, and not its last one."""
    is_whole = data.startswith(MIDDLE) and data.find(b"\n\n") == len(data) - 2
    return is_whole and b'"finish_reason":"' not in data


def _prepend(extra: dict[str, Any], payload: bytes) -> bytes:
    """``extra`` as the first keys of a JSON object, without parsing the rest of it."""
    return _front(extra) + (b"" if payload.startswith(b"{}") else b",") + payload[1:]


def _front(extra: dict[str, Any]) -> bytes:
    """The beginning of a JSON object with these keys."""
    return b"{" + json.dumps(extra, ensure_ascii=False, separators=(",", ":")).encode()[1:-1]
