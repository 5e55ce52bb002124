"""How far a stream is that its client may take up again, told by the ids of its events. Pure; no HTTP types.

An id says which output tokens the event belongs to. Every ingress makes the same events of the same tokens when they
are cut at the same places, so it can leave out what the client has.
"""

import hashlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from protocol.kept_streams import KeptStream
from serving.request.slo import SloError, shown, strip_body

LAST_EVENT_ID = "last-event-id"
NAME_BYTES, DIGEST_BYTES = 16, 8
LONGEST_ID = 512
_MOST = 1 << 31


class Position(NamedTuple):
    """The place of one event in its stream."""

    name: str  # of the stream, as secret as its content
    start: int  # output tokens before the piece of output that the event tells of
    end: int  # with it
    event: int  # which of the events of that piece, from 1
    digest: str  # of the first ``end`` tokens
    replica: str  # that made them

    def to_id(self) -> str:
        """As the client gets it, and sends it back."""
        return f"{self.name}:{self.start}:{self.end}:{self.event}:{self.digest}:{self.replica}"


def read_position(word: str) -> Position:
    """The place that an id tells; raises ``SloError`` for what no ingress has sent."""
    parts = word.split(":", 5) if len(word) <= LONGEST_ID else []
    if len(parts) == 6 and _is_hex(parts[0], NAME_BYTES) and _is_hex(parts[4], DIGEST_BYTES):
        start, end, event = map(_count, parts[1:4])
        if start <= end < _MOST and 0 < event < _MOST:
            return Position(parts[0], start, end, event, parts[4], parts[5])
    raise SloError(LAST_EVENT_ID, f"is not the id of an event of a stream: {shown(word)}")


def _count(word: str) -> int:
    """The number that a word is; ``_MOST`` where it is none."""
    return int(word) if word.isascii() and word.isdigit() and len(word) < 11 else _MOST


def _is_hex(word: str, size: int) -> bool:
    return len(word) == 2 * size and all(letter in "0123456789abcdef" for letter in word)


def resume_key(name: str, tenant: str, path: str, document: Mapping[str, Any]) -> str:
    """By which replicas know a stream: nobody has it who does not know the stream's name, or could not have made the
    same request with the same API key."""
    body = msgspec.json.encode(strip_body(dict(document)), order="deterministic")
    hashed = hashlib.blake2b(digest_size=NAME_BYTES, person=b"polyslo stream")
    for part in (name.encode(), tenant.encode(), path.encode(), body):
        hashed.update(len(part).to_bytes(8) + part)
    return hashed.hexdigest()


def can_be_made_again(document: Mapping[str, Any]) -> bool:
    """Whether the same request gives the same tokens: greedy, or with a seed."""
    temperature, seed = document.get("temperature"), document.get("seed")
    is_greedy = isinstance(temperature, int | float) and temperature == 0
    return is_greedy or (isinstance(seed, int) and not isinstance(seed, bool))


class StreamTrail:
    """The events of one stream, counted. ``resumed``: where its client has it from; ``kept``: its tokens so far."""

    def __init__(self, name: str, key: str, resumed: Position | None = None) -> None:
        self.name, self.key, self.resumed = name, key, resumed
        self.kept: KeptStream | None = None
        self.asked_s = 0.0  # when its client took it up, by the clock of its request
        self.how = ""  # it goes on: "continued", "complete" or "recomputed"
        self.is_diverged = False  # what is made now is not what the client has
        self.request_id = ""  # of its one sequence
        self.replica: Callable[[], str] = lambda: ""
        self._replica = resumed.replica if resumed else ""
        self._start = self._end = self._event = 0
        self._hash = hashlib.blake2b(digest_size=DIGEST_BYTES)

    def note(self, token_ids: Sequence[int], is_last: bool = False) -> None:
        """The events that follow are about these tokens."""
        if token_ids:
            self._start, self._end, self._event = self._end, self._end + len(token_ids), 0
            self._hash.update(array("q", token_ids).tobytes())
        if (had := self.resumed) is not None:
            is_other = self._end == had.end and self._hash.hexdigest() != had.digest
            if is_other or (is_last and self._end < had.end) or self._start < had.end < self._end:
                self.is_diverged = True

    @property
    def tokens(self) -> int:
        """That were noted so far."""
        return self._end

    def event_id(self) -> str | None:
        """The id of the next event; None where the client has it."""
        self._event += 1
        self._replica = self.replica() or self._replica
        had = self.resumed
        if had is not None and (self._end < had.end or (self._end == had.end and self._event <= had.event)):
            return None
        digest = self._hash.hexdigest()
        return Position(self.name, self._start, self._end, self._event, digest, self._replica).to_id()

    @property
    def cuts(self) -> list[int]:
        """After how many tokens an output must end, so that its events are those that the client had."""
        return sorted({self.resumed.start, self.resumed.end} - {0}) if self.resumed else []


def is_continuation(kept: KeptStream, had: Position) -> bool:
    """Whether a client at this position has seen the beginning of what is kept."""
    if len(kept.tokens) < had.end:
        return False
    digest = hashlib.blake2b(array("q", kept.tokens[: had.end]).tobytes(), digest_size=DIGEST_BYTES).hexdigest()
    return digest == had.digest
