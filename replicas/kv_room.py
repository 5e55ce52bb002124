"""An engine's KV tokens as its planner counts them, from vLLM's one pool of blocks. Imports nothing of vLLM."""

from typing import Any

import numpy as np

from replicas.engine import usable_kv_tokens


class KvRoom:
    """Tokens of an engine with one or several KV-cache groups, which all take blocks for the same token.

    Groups that keep a sliding window give blocks back; the capacity is what there is if none of them did.
    """

    def __init__(self, manager: Any, groups: int, block_tokens: int) -> None:
        self._pool, self._groups, self._block_tokens = manager.block_pool, max(1, groups), block_tokens
        self._reserved = manager.watermark_blocks  # vLLM starts nothing that would leave less
        blocks = self._pool.num_gpu_blocks - self._reserved
        self.capacity_tokens = usable_kv_tokens(blocks, block_tokens, self._groups)
        self._counts_less = manager.enable_caching or self._groups > 1

    @property
    def used_tokens(self) -> int:
        used = self._pool.num_gpu_blocks - 1 - self._pool.get_num_free_blocks()
        return int(-(-used // self._groups)) * self._block_tokens

    def planned_capacity(self, running: np.ndarray) -> int:
        """The capacity, more what ``running`` requests hold less than it seems, less what others hold.

        A common prefix counts for each request. Others are those that have ended or wait, and whose blocks a connector
        keeps. A request may hold one block for tokens under way.
        """
        seeming = -(-running["computed_tokens"] // self._block_tokens)
        surplus = int(seeming.sum()) * self._block_tokens - self.used_tokens
        shared = max(0, surplus) if self._counts_less else 0
        return self.capacity_tokens + shared + min(0, surplus + len(running) * self._block_tokens)

    def is_short(self, sequences: int, tokens: int) -> bool:
        """Whether a batch of so many may take more blocks than are free."""
        wanted = (sequences + tokens // self._block_tokens) * self._groups
        return bool(self._pool.get_num_free_blocks() - self._reserved < wanted)
