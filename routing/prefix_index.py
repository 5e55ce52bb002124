"""Which prompts a replica's prefix cache presumably holds, by digest. Approximate: promises rest on what the replica
itself tells (``controller.mirror.told_prefixes``).

A prompt is represented by at most ``MAX_HASHES`` block hashes. Each is the digest of all tokens up to the end of a
block, and the blocks are evenly spaced. The spacing doubles with the length, so that prompts of any length have hashes
in common. Neither tokens nor text are kept.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

MAX_HASHES = 64


def hash_spacing(prompt_tokens: int, block_tokens: int) -> int:
    """Tokens between two marks of a prompt: the fewest blocks, by doubling, that ``MAX_HASHES`` of reach over it."""
    spacing = block_tokens
    while prompt_tokens // spacing > MAX_HASHES:
        spacing *= 2
    return spacing


def is_marked(blocks: int) -> bool:
    """Whether the end of a prompt's block of this number, from 1, is a mark of any prompt that is as long."""
    return blocks % hash_spacing(blocks, 1) == 0


class PrefixDigest:
    """The digest of a prompt from its start to some block's end."""

    __slots__ = ("_digest",)

    def __init__(self, salt: str = "", of: "hashlib.blake2b | None" = None) -> None:
        self._digest = of or hashlib.blake2b(salt.encode(), digest_size=8)

    def extended(self, tokens: Sequence[int] | np.ndarray) -> "PrefixDigest":
        """The same with these tokens after it."""
        digest = self._digest.copy()
        digest.update(np.asarray(tokens, dtype="<u4").tobytes())
        return PrefixDigest(of=digest)

    @property
    def mark(self) -> int:
        return int.from_bytes(self._digest.digest())


def salt_of(cache_salt: str | None, adapter: str) -> str:
    """What KV caches depend on beside the tokens, as marks know it."""
    return repr((cache_salt, adapter))


def hash_prefix(tokens: Sequence[int], block_tokens: int, salt: str = "") -> tuple[int, ...]:
    """The marks of a prompt, from its start. Equal marks: equal tokens up to there, under an equal ``salt``."""
    spacing, digest = hash_spacing(len(tokens), block_tokens), PrefixDigest(salt)
    words, block_hashes = np.asarray(tokens, dtype="<u4"), []
    for end in range(spacing, len(words) + 1, spacing):
        digest = digest.extended(words[end - spacing : end])
        block_hashes.append(digest.mark)
    return tuple(block_hashes)


class PrefixIndex:
    """What one replica was given last, as much of it as its KV cache holds: least recently used first out."""

    def __init__(self, capacity_tokens: int) -> None:
        """``capacity_tokens``: of its KV cache."""
        self._capacity_tokens = capacity_tokens
        self._held_tokens = 0
        self._tokens: OrderedDict[int, int] = OrderedDict()  # by mark; what no mark stands for under numbers below 0
        self._unmarked = 0

    def __len__(self) -> int:
        return len(self._tokens)

    def hits(self, block_hashes: Sequence[int]) -> int:
        """How many of a prompt's marks, from its start, are reached by what is presumably held.

        By doubling and bisecting: a prompt with another spacing shares every second, fourth, ... mark.
        """
        found, step = 0, 1
        while step <= len(block_hashes):
            found = step if block_hashes[step - 1] in self._tokens else found
            step *= 2
        step = found
        while step > 1:
            step //= 2
            if found + step <= len(block_hashes) and block_hashes[found + step - 1] in self._tokens:
                found += step
        return found

    def record(self, block_hashes: Sequence[int], spacing_tokens: int, other_tokens: int) -> None:
        """A request was given to the replica: its marks, and the tokens of prompt and output that they do not cover.

        The end of a prompt goes before its beginning, as in vLLM.
        """
        self._unmarked -= 1
        self._use(self._unmarked, other_tokens)
        for block_hash in reversed(block_hashes):
            self._use(block_hash, spacing_tokens)
        while self._held_tokens > self._capacity_tokens:
            self._held_tokens -= self._tokens.popitem(last=False)[1]

    def forget(self, block_hashes: Iterable[int]) -> None:
        """The replica says that it holds these no more."""
        for block_hash in block_hashes:
            self._held_tokens -= self._tokens.pop(block_hash, 0)

    def _use(self, key: int, tokens: int) -> None:
        self._held_tokens += tokens - self._tokens.pop(key, 0)
        self._tokens[key] = tokens
