"""Which prefix blocks each replica still holds, as vLLM's block pool keeps them, in what placed requests leave free.

Least recently used conversations go first, and of a conversation its tail goes first. What a placed request found stays
until it ends. Blocks become known when a request ends. One that is shared by two running requests counts twice in the
KV cache: the model errs to the safe side.
"""

from collections import Counter, OrderedDict

import numpy as np


class PrefixCache:
    """Block ids per replica, in the order in which they go."""

    def __init__(self, blocks: np.ndarray, block_tokens: int, jobs: np.ndarray, replicas: int) -> None:
        self._blocks, self.block_tokens = blocks, block_tokens
        self._first, self._count = jobs["first_block"], jobs["blocks"]
        self.held: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(replicas)]
        self.used: list[Counter[int]] = [Counter() for _ in range(replicas)]  # found by requests that have not ended
        self._found: dict[int, tuple[int, list[int]]] = {}  # by job: the replica, and what it found there

    def blocks(self, job: int) -> list[int]:
        """Prefix blocks of a job, the prompt's start first."""
        start = self._first[job]
        found: list[int] = self._blocks[start : start + self._count[job]].tolist()
        return found

    def known(self, replica: int) -> set[int]:
        """Blocks that a request would find there."""
        return set(self.held[replica]) | set(self.used[replica])

    def take(self, replica: int, job: int, prompt_tokens: int) -> int:
        """Tokens of the prompt found there, which stay until the job ends; one token at least is left to compute."""
        self.release(job)
        held, used, found = self.held[replica], self.used[replica], list[int]()
        for block in self.blocks(job):
            if block not in held and block not in used:
                break
            found.append(block)
        for block in found:
            used[block] += 1
            held.pop(block, None)
        self._found[job] = replica, found
        return min(len(found) * self.block_tokens, prompt_tokens - 1)

    def found_tokens(self, job: int) -> int:
        """KV tokens of a placed job that it found."""
        return len(self._found[job][1]) * self.block_tokens if job in self._found else 0

    def release(self, job: int) -> None:
        """A job leaves what it found."""
        replica, found = self._found.pop(job, (0, []))
        used = self.used[replica]
        used.subtract(found)
        for block in found:
            if used[block] == 0:
                del used[block]
        self._put(replica, found)

    def keep(self, replica: int, job: int) -> None:
        """Remember a request that ended."""
        self.release(job)
        self._put(replica, self.blocks(job))

    def _put(self, replica: int, blocks: list[int]) -> None:
        """The last to go, the prompt's start the very last."""
        held, used = self.held[replica], self.used[replica]
        for block in reversed(blocks):
            if block not in used:
                held[block] = None
                held.move_to_end(block)

    def shrink(self, replica: int, free_tokens: int) -> None:
        """Give blocks up until the rest fits ``free_tokens``."""
        held = self.held[replica]
        while len(held) > max(0, free_tokens // self.block_tokens):
            held.popitem(last=False)

    def held_tokens(self, replica: int) -> int:
        """KV tokens in blocks of ended requests."""
        return len(self.held[replica]) * self.block_tokens
