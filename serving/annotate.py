"""Adds ``service_tier`` and the ``slo`` object to responses and stream events of vLLM's server; mends error codes."""

import json
from typing import Any

from serving.ticket import Ticket

_FINAL_RESPONSE_EVENTS = (b"response.completed", b"response.incomplete", b"response.failed")


def annotate_json(body: bytes, ticket: Ticket) -> bytes:
    """A whole JSON response with the tier that served it and its verdict; errors get OpenAI's four keys."""
    try:
        document = json.loads(body)
    except ValueError:
        return body
    if not isinstance(document, dict):
        return body
    if isinstance(document.get("error"), dict):
        document["error"] = openai_error(document["error"])
    else:
        document |= {"service_tier": ticket.tier, "slo": ticket.slo_object()}
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


def openai_error(error: dict[str, Any]) -> dict[str, Any]:
    """vLLM's numeric ``code`` as the string (or null) that OpenAI's clients expect; all four keys present."""
    message, code = str(error.get("message", "")), error.get("code")
    if not isinstance(code, str):
        known = {404: "model_not_found"}.get(code) if isinstance(code, int) else None
        code = "context_length_exceeded" if "maximum context length" in message else known
    return {
        "message": message,
        "type": error.get("type") or "invalid_request_error",
        "param": error.get("param"),
        "code": code,
    }


class StreamAnnotator:
    """Annotates server-sent events one by one; bytes may arrive cut anywhere."""

    def __init__(self, ticket: Ticket) -> None:
        self.ticket, self._rest = ticket, b""

    def feed(self, data: bytes, last: bool) -> bytes:
        """Complete events of ``data``, annotated; the remainder waits for its end (or passes when ``last``)."""
        events = (self._rest + data).split(b"\n\n")
        self._rest = b"" if last else events.pop()
        done = [self._annotate(event) for event in events]
        return b"\n\n".join(done) + (b"\n\n" if done and not last else b"")

    def _annotate(self, event: bytes) -> bytes:
        head, mark, payload = event.partition(b"data: ")  # the first: the text in the payload may say it again
        if not mark or not payload.startswith(b"{"):
            return event
        if payload.startswith(b'{"error"'):
            document = json.loads(payload)
            return head + mark + json.dumps({"error": openai_error(document["error"])}).encode()
        if head.startswith(b"event: "):
            return head + mark + self._named_event(head, payload)
        extra: dict[str, Any] = {"service_tier": self.ticket.tier}
        if b'"finish_reason":"' in payload:
            extra["slo"] = self.ticket.slo_object()
        return head + mark + _prepend(extra, payload)

    def _named_event(self, head: bytes, payload: bytes) -> bytes:
        """Responses API events carry the response object; Anthropic's ``message_delta`` carries the stop reason."""
        if b'"response":' in payload and head.startswith(b"event: response."):
            document = json.loads(payload)
            if isinstance(document.get("response"), dict):
                document["response"]["service_tier"] = self.ticket.tier
                if head[7:].startswith(_FINAL_RESPONSE_EVENTS):
                    document["response"]["slo"] = self.ticket.slo_object()
            return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
        if head.startswith(b"event: message_delta"):
            return _prepend({"service_tier": self.ticket.tier, "slo": self.ticket.slo_object()}, payload)
        return payload


def _prepend(extra: dict[str, Any], payload: bytes) -> bytes:
    """``extra`` as the first keys of a JSON object, without parsing the rest of it."""
    inner = json.dumps(extra, ensure_ascii=False, separators=(",", ":")).encode()[1:-1]
    return b"{" + inner + (b"" if payload.startswith(b"{}") else b",") + payload[1:]
