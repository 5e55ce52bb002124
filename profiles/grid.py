"""Which compositions to measure on a live engine: a grid that stays within its KV cache and limits."""

from __future__ import annotations

from dataclasses import dataclass

from profiles.profile import ProfileError

DECODE_SEQS = (0, 1, 2, 4, 8, 16, 32, 48, 64, 128, 256)
KV_TOKENS_EACH = (32, 256, 1024, 2048, 4096, 8192, 16384, 32768)
CHUNK_TOKENS = (1, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
CACHED_SHARES = (0.0, 0.25, 0.75)  # of the longest context
TRIES = 3  # iterations that a chunk may take: a cached context that was evicted is computed again
DECODE_STEPS = 3  # iterations of decodes alone between two chunks
ALONE = ((0, 0),)  # in place of chunks: no sequence fits beside the decodes
LEAST_COMPOSITIONS = 12  # fewer do not tell the terms of the model apart


@dataclass(frozen=True)
class Stage:
    """``decode_seqs`` decodes held at about ``kv_tokens_each``, beside which each chunk is measured in turn."""

    decode_seqs: int
    kv_tokens_each: int
    chunks: tuple[tuple[int, int], ...]  # (chunk tokens, cached tokens)

    @property
    def compositions(self) -> int:
        """How many it measures: each chunk, and the decodes alone."""
        return sum(tokens > 0 for tokens, _ in self.chunks) + (self.decode_seqs > 0)


@dataclass(frozen=True)
class EngineLimits:
    """What one engine can hold and run at a time."""

    kv_capacity_tokens: int
    max_model_tokens: int
    max_batch_tokens: int
    max_sequences: int
    block_tokens: int


def plan_stages(limits: EngineLimits, max_decode_seqs: int = 48, max_chunk_tokens: int = 1024) -> list[Stage]:
    """Every stage of the grid that fits, cheap ones first.

    A decode grows by one token per iteration, so room is kept for all iterations between and with the chunks; a prompt
    needs one token for its output. The longest KV length measured is the largest that the model allows.
    """
    growth = (DECODE_STEPS + 1 + TRIES) * len(_chunks(limits, 0, limits.kv_capacity_tokens, max_chunk_tokens))
    longest = limits.max_model_tokens - growth
    lengths = sorted({length for length in KV_TOKENS_EACH if length < longest} | {longest}) if longest > 0 else []
    most, stages = min(max_decode_seqs, max(1, limits.max_sequences - 1)), []
    for decode_seqs in (d for d in DECODE_SEQS if d <= most):
        for kv_each in lengths if decode_seqs else (0,):
            held = decode_seqs * (kv_each + growth + limits.block_tokens)
            chunks = _chunks(limits, decode_seqs, limits.kv_capacity_tokens - held, max_chunk_tokens)
            if chunks:
                stages.append(Stage(decode_seqs, kv_each, chunks))
    return sorted(stages, key=lambda stage: stage.decode_seqs * stage.kv_tokens_each)


def _chunks(limits: EngineLimits, decode_seqs: int, free_tokens: int, largest: int) -> tuple[tuple[int, int], ...]:
    """Chunks on cached contexts (whole blocks) that fit beside the decodes in batch, context length and KV cache."""
    if decode_seqs == limits.max_sequences:
        return ALONE if free_tokens >= 0 else ()
    room = min(limits.max_model_tokens - 1, free_tokens - 2 * limits.block_tokens)
    found = []
    whole = (int(share * limits.max_model_tokens) // limits.block_tokens for share in CACHED_SHARES)
    for cached in dict.fromkeys(blocks * limits.block_tokens for blocks in whole):
        tokens = [t for t in CHUNK_TOKENS if t <= min(largest, limits.max_batch_tokens - decode_seqs)]
        found += [(chunk, cached) for chunk in tokens if chunk + cached <= room]
    return tuple(found)


QUICK_DECODE_SEQS = (0, 1, 4, 16, 48, 128)
QUICK_KV_TOKENS = (64, 1024, 4096)
QUICK_CHUNKS = (16, 128, 512, 2048)


def plan_quick(limits: EngineLimits) -> list[Stage]:
    """A grid for a minute: a few stages, cheap ones first, that tell the terms of the iteration time apart.

    Where too few of them fit the engine, all that do.

    Raises:
        ProfileError: those are too few as well.
    """
    growth = (DECODE_STEPS + 1 + TRIES) * 2 * len(QUICK_CHUNKS)
    stages = []
    for decode_seqs in (d for d in QUICK_DECODE_SEQS if d < limits.max_sequences):
        for kv_each in QUICK_KV_TOKENS if decode_seqs else (0,):
            free = limits.kv_capacity_tokens - decode_seqs * (kv_each + growth + limits.block_tokens)
            room = min(limits.max_model_tokens - 1, free - 2 * limits.block_tokens)
            cached = min(limits.max_model_tokens // 2, QUICK_KV_TOKENS[-1]) // limits.block_tokens * limits.block_tokens
            largest = limits.max_batch_tokens - decode_seqs
            chunks = [(t, c) for c in sorted({0, cached}) for t in QUICK_CHUNKS if t <= largest and t + c <= room]
            if chunks and kv_each + growth < limits.max_model_tokens:
                stages.append(Stage(decode_seqs, kv_each, tuple(chunks)))
    if _compositions(stages) < LEAST_COMPOSITIONS:
        stages = plan_stages(limits)
        if (fit := _compositions(stages)) < LEAST_COMPOSITIONS:
            raise ProfileError(f"only {fit} kinds of iterations fit the engine: too few for a profile ({limits})")
    return sorted(stages, key=lambda stage: stage.decode_seqs * stage.kv_tokens_each)


def _compositions(stages: list[Stage]) -> int:
    return sum(stage.compositions for stage in stages)
