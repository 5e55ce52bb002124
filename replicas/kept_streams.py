"""Token ids of streams that a client may take up again after its ingress has died. Clock readings are the caller's.

A stream is found by a key that only its client's request and its client's secret give (``serving.request.trail``).
Memory: live streams hold at most what their KV cache does, ended ones ``MOST_TOKENS`` for ``KEEP_S`` seconds.
"""

from array import array
from dataclasses import dataclass, field

from protocol.kept_streams import KEEP_S, MOST_GIVEN, MOST_TOKENS, KeptStream
from protocol.messages import FINISHED, Delta, Submission


@dataclass
class _Stream:
    """One stream, live until ``ended_s``."""

    request_id: str
    key: str
    born_s: float  # when the request arrived at its first ingress, by this clock
    ttft_s: float
    tokens: "array[int]" = field(default_factory=lambda: array("q"))
    times_s: "array[float]" = field(default_factory=lambda: array("f"))
    finish: str = ""
    stop_reason: int | str | None = None
    given: int = 0  # times that it was given away before it was complete
    ended_s: float | None = None

    def add(self, token_ids: tuple[int, ...], now_s: float) -> None:
        self.tokens.extend(token_ids)
        self.times_s.extend([now_s - self.born_s] * len(token_ids))


class KeptStreams:
    """The streams of one replica whose requests have a ``resume_key``."""

    def __init__(self, most_tokens: int = MOST_TOKENS, keep_s: float = KEEP_S) -> None:
        self._most_tokens, self._keep_s = most_tokens, keep_s
        self._live: dict[str, _Stream] = {}  # by request
        self._by_key: dict[str, _Stream] = {}
        self._ended: dict[str, _Stream] = {}  # by key, oldest first
        self.ended_tokens = 0

    def open(self, submission: Submission, now_s: float) -> None:
        """Keep what is made for this request. Its earlier tokens count as made now, because nobody here saw when."""
        if not submission.resume_key:
            return
        self.drop(submission.resume_key)
        born_s = now_s - submission.age_s
        stream = _Stream(submission.request_id, submission.resume_key, born_s, submission.slo.ttft_s)
        stream.add(submission.sent_tokens, now_s)
        self._live[stream.request_id] = self._by_key[stream.key] = stream

    def note(self, delta: Delta, now_s: float) -> None:
        """Keep the news of a request, if its stream is kept."""
        if (stream := self._live.get(delta.request_id)) is not None:
            stream.add(delta.token_ids, now_s)
            if delta.finish in FINISHED:
                stream.finish, stream.stop_reason = delta.finish, delta.stop_reason

    def end(self, request_id: str, now_s: float) -> None:
        """The request runs no more; its tokens stay for a while."""
        if (stream := self._live.pop(request_id, None)) is not None and self._by_key.get(stream.key) is stream:
            stream.ended_s = now_s
            self._ended[stream.key] = stream
            self.ended_tokens += len(stream.tokens)
            self.expire(now_s)

    def expire(self, now_s: float) -> None:
        """Forget what ended long ago, and what is beyond ``most_tokens``."""
        for key, stream in list(self._ended.items()):
            is_old = stream.ended_s is not None and now_s - stream.ended_s > self._keep_s
            if not is_old and self.ended_tokens <= self._most_tokens:
                break
            self.drop(key)

    def request_of(self, key: str) -> str:
        """The request that makes this stream or made it; empty: none is kept."""
        stream = self._by_key.get(key)
        return stream.request_id if stream is not None else ""

    def drop(self, key: str) -> None:
        """Keep a stream no longer; its request goes on."""
        if (stream := self._by_key.pop(key, None)) is not None:
            self._live.pop(stream.request_id, None)
            if self._ended.pop(key, None) is not None:
                self.ended_tokens -= len(stream.tokens)

    def take(self, key: str, now_s: float) -> KeptStream | None:
        """Give a stream away, as far as it is; nothing is added to it any more.

        It stays, for an ingress that did not get it or whose client did not. But only a complete one costs no engine
        anything, so others are given away ``MOST_GIVEN`` times.
        """
        stream = self._by_key.get(key)
        if stream is None:
            return None
        self.end(stream.request_id, now_s)
        if not stream.finish:
            stream.given += 1
            if stream.given == MOST_GIVEN:
                self.drop(key)
        age_s = now_s - stream.born_s
        tokens, times_s = tuple(stream.tokens), tuple(stream.times_s)
        return KeptStream(tokens, times_s, age_s, stream.ttft_s, stream.finish, stream.stop_reason)
