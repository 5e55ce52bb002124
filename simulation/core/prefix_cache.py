"""Which prefix blocks each replica still holds: least recently used first out, in what the running requests leave free.

Blocks become known when a request ends. One that is shared by two running requests counts twice in the KV cache: the
model errs to the safe side.
"""

from collections import OrderedDict

import numpy as np


class PrefixCache:
    """Block ids per replica, in order of last use."""

    def __init__(self, blocks: np.ndarray, block_tokens: int, jobs: np.ndarray, replicas: int) -> None:
        self._blocks, self.block_tokens = blocks, block_tokens
        self._first, self._count = jobs["first_block"], jobs["blocks"]
        self.held: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(replicas)]

    def blocks(self, job: int) -> list[int]:
        """Prefix blocks of a job, the prompt's start first."""
        start = self._first[job]
        found: list[int] = self._blocks[start : start + self._count[job]].tolist()
        return found

    def hit_tokens(self, replica: int, job: int, prompt_tokens: int) -> int:
        """Tokens of the prompt found there; one token at least is left to compute."""
        held, hits = self.held[replica], 0
        for block in self.blocks(job):
            if block not in held:
                break
            held.move_to_end(block)
            hits += 1
        return min(hits * self.block_tokens, prompt_tokens - 1)

    def keep(self, replica: int, job: int, free_tokens: int) -> None:
        """Remember a request that ended, as far as ``free_tokens`` of KV cache go."""
        held = self.held[replica]
        for block in self.blocks(job):
            held[block] = None
            held.move_to_end(block)
        self.shrink(replica, free_tokens)

    def shrink(self, replica: int, free_tokens: int) -> None:
        """Give blocks up until the rest fits ``free_tokens``."""
        held = self.held[replica]
        while len(held) > max(0, free_tokens // self.block_tokens):
            held.popitem(last=False)

    def held_tokens(self, replica: int) -> int:
        """KV tokens in blocks of ended requests."""
        return len(self.held[replica]) * self.block_tokens


def held_kv_tokens(table: np.ndarray) -> int:
    """KV tokens of running requests, prompts under way counted whole."""
    running = table[table["running"]]
    return int(np.maximum(running["computed_tokens"], running["prompt_tokens"]).sum(dtype=np.int64))
