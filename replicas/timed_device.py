"""A device that computes nothing: when a batch is done, by a profile, and which tokens it emits. No ray, vllm or torch.

Batches run one after the other, as on a real device, however many of them are in flight; in a pipeline each stage runs
one at a time. Tokens depend only on the prompt and the position, so a stream that continues on another replica
continues with the same tokens.
"""

import math
import zlib
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from planning.batch.composition import PAIRS
from profiles.kernels import iteration_s
from replicas.simulated import simulated_tokens
from replicas.straying import Straying

TEXT = simulated_tokens(0, 0, 1 << 12)  # byte-level token ids; every stream walks through them in its own order
STRIDE = 2_467  # odd, so that a stream of as many tokens repeats none of the places


class TimedSettings(msgspec.Struct, frozen=True):
    """What the device is told, in the engine's process."""

    coefficients: list[float]  # of ``profiles.kernels.iteration_s``
    kv_capacity_tokens: int
    steps_in_flight: int = 2
    spread: float = 0.0  # sigma of the log-normal factor, of mean 1, by which an iteration differs from the profile
    strays: list[list[float]] = []  # in place of that: ``IterationSpread.logs``
    acceptance: float = 0.7  # chance that a draft token is accepted
    stages: int = 1  # of a pipeline, each with the same part of the profile's time


class Share(msgspec.Struct, frozen=True):
    """One request's part of a batch."""

    request_id: str
    tokens: int  # that this batch runs, drafts among them
    computed_tokens: int  # before it
    known_tokens: int  # prompt and output, with what steps in flight will emit
    drafts: int = 0

    @property
    def emits(self) -> bool:
        return self.computed_tokens + self.tokens >= self.known_tokens


def composition(shares: Sequence[Share]) -> tuple[float, float, float, float, float]:
    """A batch in the terms of the iteration-time model."""
    kv_tokens = pairs = 0.0
    for share in shares:
        after = share.computed_tokens + share.tokens
        if share.tokens == 1 + share.drafts:
            kv_tokens += after
        else:
            pairs += share.tokens * (after - share.tokens / 2)
    tokens, drafts = sum(share.tokens for share in shares), max((share.drafts for share in shares), default=0)
    return float(tokens), kv_tokens, pairs, float(len(shares)), float(drafts)


class TimedDevice:
    """The time of batches and the text of streams. Clock readings are the caller's."""

    def __init__(self, settings: TimedSettings, random: np.random.Generator) -> None:
        self._settings, self._random = settings, random
        self._coefficients = np.array(settings.coefficients)
        self._straying = Straying(settings.spread, settings.strays, random)
        self._free_s = [-math.inf] * settings.stages  # when each stage is done with its batches
        self._out_s: dict[str, float] = {}  # when a stream's last token is out, which its next one needs
        self._streams: dict[str, list[int]] = {}  # digest of the prompt, tokens made, of them elsewhere
        self.run_s([], 0.0)  # compiles

    def begin_stream(self, request_id: str, prompt: Sequence[int], elsewhere: int) -> None:
        """A request comes; the last ``elsewhere`` tokens of its prompt are output of another replica."""
        own = np.array(prompt[: len(prompt) - elsewhere], dtype=np.int32)
        self._streams[request_id] = [zlib.crc32(own.tobytes()), elsewhere, elsewhere]

    def resume_stream(self, request_id: str, made: int) -> None:
        """A request that was preempted goes on after ``made`` tokens that it emitted here."""
        stream = self._streams[request_id]
        stream[1] = stream[2] + made

    def end_stream(self, request_id: str) -> None:
        """Forget a request; an unknown one is ignored."""
        self._streams.pop(request_id, None)
        self._out_s.pop(request_id, None)

    def run_s(self, shares: Sequence[Share], now_s: float) -> float:
        """Queue a batch; returns when it will be done."""
        mix = composition(shares)
        seconds = float(iteration_s(self._coefficients, *mix)) * self._straying.factor(mix[PAIRS] > 0)
        done_s = max([now_s, *(self._out_s.get(share.request_id, now_s) for share in shares)])
        for stage, free_s in enumerate(self._free_s):
            done_s = self._free_s[stage] = max(done_s, free_s) + seconds / len(self._free_s)
        self._out_s.update((share.request_id, done_s) for share in shares if share.emits)
        return done_s

    def emit(self, share: Share) -> list[int]:
        """The tokens that a request gets of a batch: the accepted drafts and one more, or none."""
        if not share.emits:
            return []
        accepted = 0
        while accepted < share.drafts and self._random.random() < self._settings.acceptance:
            accepted += 1
        stream = self._streams[share.request_id]
        stream[1] += 1 + accepted
        return self.text(share.request_id, stream[1] - 1 - accepted, 1 + accepted)

    def propose(self, request_id: str, count: int) -> list[int]:
        """The next ``count`` tokens of a stream, as a drafter would guess them."""
        return self.text(request_id, self._streams[request_id][1], count)

    def text(self, request_id: str, first: int, count: int) -> list[int]:
        """Tokens ``first .. first + count`` of a stream."""
        digest = self._streams[request_id][0]
        return [TEXT[(digest + STRIDE * place) % len(TEXT)] for place in range(first, first + count)]


def check_timed(params: Any) -> None:
    """Raise ``ValueError`` for sampling parameters (vLLM's) that a device without logits cannot follow."""
    if params is not None and params.structured_outputs is not None:
        raise ValueError("structured output: a timed device computes no logits")
    if params is not None and (params.logprobs is not None or params.prompt_logprobs is not None):
        raise ValueError("logprobs: a timed device computes none")
