"""One streamed answer as the client sees it: bytes with their arrival times in, timed tokens and the verdict out.

Tokens are counted by the running total that vLLM adds to each chunk (``continuous_usage_stats``): a chunk may carry
several tokens, and its text may be empty. A server without it is counted one token per chunk, corrected by the last
total, and the answer is marked as estimated.
"""

from array import array

import msgspec
import numpy as np


class SloEcho(msgspec.Struct, frozen=True):
    """The ``slo`` object that the server attaches before usage."""

    admitted: bool | None = None
    promised: bool | None = None  # whatever came later
    tier: str | None = None
    replica: str | None = None
    hops: int | None = None
    predicted_ttft_ms: float | None = None
    predicted_tpot_ms: float | None = None
    target_ttft_ms: float | None = None
    ttft_chance: float | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None
    met: bool | None = None
    reason: str | None = None
    resumed: int = 0  # how often a replica has lost it


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _Choice(msgspec.Struct):
    text: str | None = None
    finish_reason: str | None = None


class _Error(msgspec.Struct):
    message: str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    slo: SloEcho | None = None
    service_tier: str | None = None
    error: _Error | None = None


_decoder = msgspec.json.Decoder(_Event)


class StreamReader:
    """Reads server-sent events of ``/v1/completions`` as they arrive, in pieces of any size."""

    def __init__(self) -> None:
        self.chunk_s = array("d")
        self.chunk_tokens = array("l")
        self.tokens = 0
        self.finish = ""
        self.error = ""
        self.service_tier = ""
        self.slo: SloEcho | None = None
        self.is_estimated = False
        self._rest = b""
        self._has_running_total = False

    def feed(self, data: bytes, now_s: float) -> None:
        """Take in bytes that arrived at ``now_s``; what cannot be parsed becomes the stream's error."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                payload = line[5:].strip()
                if payload != b"[DONE]":
                    self._take(payload, now_s)

    def failure(self) -> str:
        """Why the answer is not whole, or nothing."""
        if self.error:
            return self.error
        if self.finish in ("", "abort", "error"):
            return f"finish reason {self.finish!r}" if self.finish else "the stream broke off"
        return ""

    def _take(self, payload: bytes, now_s: float) -> None:
        try:
            event = _decoder.decode(payload)
        except (msgspec.MsgspecError, UnicodeError) as error:
            self.error = self.error or f"unreadable event: {error}"
            return
        if event.error is not None:
            self.error = event.error.message or "error event without a message"
        self.slo = event.slo or self.slo
        self.service_tier = event.service_tier or self.service_tier
        if event.choices:
            self.finish = event.choices[0].finish_reason or self.finish
            self._count(event, now_s)
        elif event.usage is not None and event.usage.completion_tokens != self.tokens:
            self._correct(event.usage.completion_tokens)

    def _count(self, event: _Event, now_s: float) -> None:
        if event.usage is not None:
            self._has_running_total = True
            new = event.usage.completion_tokens - self.tokens
        else:
            new = 0 if self._has_running_total or not event.choices[0].text else 1
        if new > 0:
            self.chunk_s.append(now_s)
            self.chunk_tokens.append(new)
            self.tokens += new

    def _correct(self, total: int) -> None:
        """Spread the true total evenly over the chunks seen."""
        self.is_estimated = True
        chunks = len(self.chunk_s)
        if chunks and total >= chunks:
            edges = np.rint(np.linspace(0, total, chunks + 1)).astype(int)
            self.chunk_tokens = array("l", np.diff(edges).tolist())
            self.tokens = total
