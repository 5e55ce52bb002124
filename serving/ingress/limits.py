"""What one request and one client may take of an ingress: the configuration, and its checks as pure functions."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Any

from serving.config.limits import GuardConfig, LimitsConfig
from serving.ingress.errors import ApiError, bad_request, overloaded
from serving.ingress.sequences import expected_sequences
from serving.ingress.turned_away import CLIENT_REQUESTS, QUEUE_FULL
from serving.request.slo import SloError, shown

RawHeaders = Iterable[tuple[bytes, bytes]]
LONGEST_ID = 128  # of a request's id, which travels with every report about it
MOST_BIASES = 4096
REQUEST_ID = b"x-request-id"
READ_BY_SERVE = frozenset({b"x-session-id", b"x-request-timeout-seconds", b"x-request-disconnect-disabled"})
READ_BY_SERVE |= {b"serve-multiplexed-model-id"}  # headers that Serve decodes as UTF-8, or else fails
OWN_XARGS = frozenset({"kv_transfer_params", "ec_transfer_params", "polyslo"})  # by which ingress and engines speak
SCORING = "/generative_scoring"  # vLLM makes a request of one token of each item
FILES = "/v1/files"  # takes the files of batches
_TEXT_ROUTES = frozenset({"/tokenize", "/detokenize", "/v1/messages/count_tokens", SCORING})


class Refusal(Exception):
    """A request that is answered with ``error`` before anything looked at what it asks for."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(error.message)
        self.error = error


def check_headers(headers: RawHeaders, limits: LimitsConfig) -> None:
    """Raise ``Refusal`` for headers that are too large or that Serve cannot read."""
    size = 0
    for name, value in headers:
        size += len(name) + len(value) + 4
        if name == REQUEST_ID and not is_sound_id(value.decode("latin-1")):
            message = f"{REQUEST_ID.decode()}: must be 1 to {LONGEST_ID} printable ASCII characters"
            raise Refusal(bad_request(message, REQUEST_ID.decode()))
        if name.replace(b"_", b"-") in READ_BY_SERVE and not value.isascii():
            raise Refusal(bad_request(f"{name.decode()}: must be ASCII", name.decode()))
    if size > limits.header_bytes:
        status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
        raise Refusal(too_large(status, f"The headers have {size} bytes; at most {limits.header_bytes} are taken."))


def is_sound_id(text: str) -> bool:
    """Whether logs, file names and datagrams can bear it."""
    return 0 < len(text) <= LONGEST_ID and text.isascii() and text.isprintable()


def takes_file(path: str) -> bool:
    """Whether the body of a POST is a file."""
    return path.rstrip("/").endswith(FILES)


def most_bytes(path: str, limits: GuardConfig) -> int:
    """How long the body of a request may be."""
    if takes_file(path):
        return limits.file_bytes
    return min(limits.body_bytes, limits.text_bytes) if path in _TEXT_ROUTES else limits.body_bytes


def too_large(status: int, message: str) -> ApiError:
    """413 or 431. The connection is closed, because the rest of the request may still be on its way."""
    return ApiError(status, message, "invalid_request_error", None, "too_large", {"connection": "close"})


def too_slow(message: str) -> ApiError:
    """408."""
    status = HTTPStatus.REQUEST_TIMEOUT
    return ApiError(status, message, "invalid_request_error", None, "request_timeout", {"connection": "close"})


def client_of(headers: RawHeaders, client_header: str) -> bytes:
    """A digest of who asks, by a proxy's header or else by the API key; empty where nothing says so.

    The first header of a name counts, as where vLLM checks the key.
    """
    told: dict[bytes, bytes] = {}
    for name, value in headers:
        told.setdefault(name, value)
    own = client_header.lower().encode()
    identity = (told.get(own) if own else None) or told.get(b"authorization") or told.get(b"x-api-key")
    return hashlib.blake2b(identity, digest_size=16).digest() if identity else b""


class Places:
    """Requests that an ingress has taken and not yet answered, in all and by client."""

    def __init__(self, most: int, per_client: int) -> None:
        self._most, self._per_client = most, per_client
        self._taken = 0
        self._by_client: dict[bytes, int] = {}

    def take(self, client: bytes) -> None:
        """Count a request in; raises ``Refusal`` where there is no place for it."""
        if self._taken >= self._most:
            raise Refusal(overloaded(HTTPStatus.SERVICE_UNAVAILABLE, QUEUE_FULL, "Too many requests are waiting."))
        if client and self._by_client.get(client, 0) >= self._per_client:
            message = f"This client has {self._per_client} requests in progress, which is all it may have."
            raise Refusal(overloaded(HTTPStatus.TOO_MANY_REQUESTS, CLIENT_REQUESTS, message))
        self._taken += 1
        if client:
            self._by_client[client] = self._by_client.get(client, 0) + 1

    def give_back(self, client: bytes) -> None:
        """Count it out again."""
        self._taken -= 1
        if client:
            left = self._by_client.pop(client) - 1
            if left:
                self._by_client[client] = left


def check_document(document: Mapping[str, Any], limits: LimitsConfig) -> None:
    """Raise ``SloError`` for a generating request that asks for too much, or for what is the fleet's own."""
    n = document.get("n")
    if n is not None and (isinstance(n, bool) or not isinstance(n, int)):  # vLLM would convert it, uncounted
        raise SloError("n", f"must be a whole number, got {shown(n)}")
    sequences = expected_sequences({**document, "use_beam_search": False})  # beams count, too
    if sequences > limits.sequences:
        raise SloError("n", f"asks for {sequences} sequences (prompts times n); at most {limits.sequences}")
    for field in ("request_id", "session_id"):
        value = document.get(field)
        if isinstance(value, str) and not is_sound_id(value):
            message = f"must be 1 to {LONGEST_ID} printable ASCII characters, got {shown(value)}"
            raise SloError(field, message)
    if document.get("background") not in (None, False):  # vLLM takes "true" and 1 as well
        raise SloError(
            "background", "is not supported: nobody would hear a refusal; stream the response, or wait for it"
        )
    _check_grammars(document, limits.grammar_bytes)
    biases = document.get("logit_bias")
    if isinstance(biases, Mapping) and len(biases) > MOST_BIASES:
        raise SloError("logit_bias", f"has {len(biases)} entries, at most {MOST_BIASES}")
    xargs = document.get("vllm_xargs")
    if isinstance(xargs, Mapping) and (reserved := OWN_XARGS.intersection(xargs)):
        raise SloError(f"vllm_xargs.{min(reserved)}", "is reserved: ingress and engines speak to each other by it")


def check_scoring(document: Mapping[str, Any], limits: LimitsConfig) -> None:
    """Raise ``SloError`` for a request for scores that asks for too many."""
    items = document.get("items")
    if isinstance(items, list) and len(items) > limits.sequences:
        raise SloError("items", f"has {len(items)} items, each a sequence; at most {limits.sequences}")


def _check_grammars(document: Mapping[str, Any], most: int) -> None:
    """Compiling takes ingress and engine time that grows with the square of a grammar; vLLM fails on other types."""
    structured = document.get("structured_outputs")
    if not isinstance(structured, Mapping | None):
        raise SloError("structured_outputs", f"must be an object, got {shown(structured)}")
    for field in ("structured_outputs", "response_format", "text"):
        if (size := len(json.dumps(document.get(field)))) > most:
            raise SloError(field, f"has {size} bytes as JSON; at most {most} are compiled")
