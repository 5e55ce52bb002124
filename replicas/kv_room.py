"""An engine's KV tokens as its planner counts them, from vLLM's one pool of blocks. Imports nothing of vLLM.

The planner counts a token once. The layers of some models are in several KV-cache groups, each of which takes blocks of
its own for the same token: all of them, or the last ones (sliding windows), or one for a whole request (Mamba).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

METADATA = "get_kv_cache_group_metadata"  # vLLM's name of what tells the groups
MOST_LOOKED_UP, MOST_BLOCKS = 8, 2048  # waiting requests in one step; none after so many cached blocks
WINDOWS, STATES = ("sliding_window", "sliding_window_mla"), ("mamba",)  # kinds of groups, as vLLM names them


class KvGroup(NamedTuple):
    """One group; ``most_tokens``: what it keeps of a request at most, 0 for all."""

    block_tokens: int
    most_tokens: int = 0


def to_groups(metadata: Iterable[Mapping[str, Any]], max_batch_tokens: int) -> tuple[KvGroup, ...]:
    """The groups as vLLM's ``METADATA`` tells them.

    Before it starts a request, vLLM wants room for its windows and for the tokens of a whole batch beyond each.
    """
    groups = []
    for told in metadata:
        block, most_tokens = int(told["block_size"]), 0
        if told["kind"] in WINDOWS:
            most_tokens = int(told["sliding_window"]) + max_batch_tokens + block
        elif told["kind"] in STATES:
            most_tokens = block
        groups.append(KvGroup(block, most_tokens))
    return tuple(groups)


def block_tokens_of(groups: Sequence[KvGroup]) -> int:
    """Tokens of a block as the planner counts: one of layers that keep all, where there are any."""
    whole = [each.block_tokens for each in groups if not each.most_tokens]
    return min(whole or [each.block_tokens for each in groups], default=1)


def blocks_of(groups: Sequence[KvGroup], tokens: np.ndarray) -> np.ndarray:
    """Blocks that requests of so many tokens take in all groups."""
    kept = (np.minimum(tokens, each.most_tokens) if each.most_tokens else tokens for each in groups)
    return np.asarray(sum(-(-n // each.block_tokens) for n, each in zip(kept, groups, strict=True)))


def usable_blocks(blocks: int, watermark: float) -> int:
    """Blocks for requests: vLLM keeps the first as a placeholder, and starts nothing that would leave a watermark."""
    return blocks - int(watermark * blocks) - 1


def told_capacity(blocks: int, watermark: float, groups: Sequence[KvGroup], max_model_tokens: int = 0) -> int:
    """KV tokens to plan requests with: as if every group kept all, or the longest of the model that fits alone."""
    usable = usable_blocks(blocks, watermark)
    if len(groups) <= 1:
        return usable * block_tokens_of(groups)
    per_token = sum(1 / each.block_tokens for each in groups)
    growing = sum(1 / each.block_tokens for each in groups if not each.most_tokens)
    bounded = sum(-(-each.most_tokens // each.block_tokens) for each in groups if each.most_tokens)
    longest = (usable - bounded) / growing if growing else max_model_tokens
    return int(max(usable / per_token, min(longest, max_model_tokens)))


class KvRoom:
    """The room of a running engine; ``told_tokens`` is the capacity that others know."""

    def __init__(self, manager: Any, groups: Sequence[KvGroup], told_tokens: int) -> None:
        self._manager, self._pool, self._groups, self._told_tokens = manager, manager.block_pool, groups, told_tokens
        self._block_tokens = block_tokens_of(groups)
        self._reserved = manager.watermark_blocks
        self._gives_back = manager.enable_caching or len(groups) > 1
        self._shares = manager.enable_caching and len(groups) == 1 and not groups[0].most_tokens

    @property
    def capacity_tokens(self) -> int:
        """The whole pool, as one group has it."""
        return int(self._pool.num_gpu_blocks - self._reserved - 1) * self._block_tokens

    @property
    def used_tokens(self) -> int:
        """The part of the pool that is taken, as one group has it."""
        used = self._pool.num_gpu_blocks - 1 - self._pool.get_num_free_blocks()
        return int(used) * self._block_tokens

    @property
    def told_used_tokens(self) -> int:
        """The same of the capacity that others know."""
        return self.used_tokens * self._told_tokens // max(1, self.capacity_tokens)

    def capacity_for(self, table: np.ndarray, waiting: Sequence[Any], may_begin: bool) -> int:
        """``planned_capacity`` for a planning table that ends with the ``waiting`` requests of vLLM.

        Where one ``may_begin`` and they do not all fit as they are, the first of them are looked up, and what the
        prefix cache holds of them by now, and running requests hold, is written into the table.
        """
        running = len(table) - len(waiting)
        waits, free = table[running:], self._pool.get_num_free_blocks() * self._block_tokens
        if may_begin and self._shares and free < waits["prompt_tokens"].sum(dtype=np.int64):
            left = MOST_BLOCKS
            for i, request in enumerate(waiting[:MOST_LOOKED_UP]):
                if left <= 0:
                    break
                cached, shared = self._look_up(request)
                waits["computed_tokens"][i] = max(waits["computed_tokens"][i], cached)
                waits["shared_tokens"][i] = shared
                left -= cached // self._block_tokens
        known_tokens = int((table["prompt_tokens"] + table["emitted_tokens"]).max(initial=0))
        # vLLM keeps the watermark beside others: who would leave none runs alone, but it runs.
        lifted = self._reserved * self._block_tokens if known_tokens >= self.capacity_tokens else 0
        return lifted + self.planned_capacity(table["computed_tokens"][:running], waits["prompt_tokens"])

    def _look_up(self, request: Any) -> tuple[int, int]:
        """Tokens that the prefix cache holds of a request, and those of them that running ones hold."""
        if not self._manager.prefix_cache_lookup_enabled(request):
            return 0, 0
        (blocks,), tokens, _ = self._manager.coordinator.find_longest_cache_hit(
            request.block_hashes, request.num_tokens - 1
        )
        return tokens, sum(block.ref_cnt > 0 for block in blocks) * self._block_tokens

    def planned_capacity(self, computed_tokens: np.ndarray, waiting_tokens: np.ndarray) -> int:
        """The capacity that makes the planner right, which counts ``computed_tokens`` of running requests as taken.

        More where requests hold less than it seems: a common prefix counts for each, windows give back. Less by what
        other groups take, by blocks that a connector keeps of requests which have ended or wait, and by what the
        request that would begin takes beyond its tokens. A request may hold one block a group for tokens under way.
        """
        seeming = int((-(-computed_tokens // self._block_tokens)).sum()) * self._block_tokens
        surplus, under_way = seeming - self.used_tokens, len(computed_tokens) * self._block_tokens * len(self._groups)
        shared = max(0, surplus) if self._gives_back else 0
        return self.capacity_tokens + shared + min(0, surplus + under_way) - self._beyond(waiting_tokens)

    def _beyond(self, waiting_tokens: np.ndarray) -> int:
        if len(self._groups) <= 1 or not len(waiting_tokens):
            return 0
        beyond = blocks_of(self._groups, waiting_tokens) + -waiting_tokens // self._block_tokens
        return max(0, int(beyond.max())) * self._block_tokens

    def is_short(self, sequences: int, tokens: int) -> bool:
        """Whether a batch of so many may take more blocks than are free."""
        wanted = (sequences + tokens // self._block_tokens) * len(self._groups)
        return bool(self._pool.get_num_free_blocks() - self._reserved < wanted)
