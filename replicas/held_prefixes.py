"""Which prefixes an engine's cache holds, by vLLM's own KV events, and what the next report says of them. Pure.

vLLM names a cached block by a hash of its own and tells it with its tokens and its predecessor. Here it becomes a mark,
as ingresses make them of prompts (``routing.prefix_index``). What cannot be followed is left out: a block whose
predecessor is not known, images and embeddings, memory outside the device. So a mark that is told is there.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from protocol.messages import Report
from protocol.prefixes import EVERYTHING, MARK, PrefixNews, packed_marks
from routing.prefix_index import PrefixDigest, is_marked, salt_of

DEVICE = (None, "GPU")  # vLLM's words for an engine's own memory, a CPU's included


class Stored(Protocol):
    """vLLM's ``BlockStored``, as far as it is read."""

    block_hashes: Sequence[Any]
    parent_block_hash: Any
    token_ids: Sequence[int]
    block_size: int
    lora_name: str | None
    extra_keys: Sequence[tuple[Any, ...] | None] | None


class Held(NamedTuple):
    """One cached block: the prompt up to its end."""

    digest: PrefixDigest
    blocks: int
    adapter: str


class HeldPrefixes:
    """The marks of one engine. Reports carry what has changed since the last one that was taken."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._held: dict[Any, Held] = {}  # by vLLM's hash
        self._changed: dict[int, bool] = {}  # marks since the last report that was taken, and whether they are there
        self._since = EVERYTHING
        self._built: PrefixNews | None = None  # what was said last, while that is still true
        self._is_one_group = True

    def __len__(self) -> int:
        return len(self._held)

    def store(self, event: Stored, group: int | None, medium: str | None) -> None:
        """Blocks one after the other have come, or were used again."""
        if group:  # a hit would need blocks of every group
            self.clear()
            self._is_one_group = False
        if not self._is_one_group or medium not in DEVICE or event.block_size != self._block_tokens:
            return
        if len(event.token_ids) != len(event.block_hashes) * event.block_size:
            return  # sparse attention: some blocks are left out
        before, keys = event.parent_block_hash, event.extra_keys or [None] * len(event.block_hashes)
        for i, (name, own_keys) in enumerate(zip(event.block_hashes, keys, strict=True)):
            if name not in self._held:
                tokens = event.token_ids[i * event.block_size : (i + 1) * event.block_size]
                held = self._follow(before, tokens, event.lora_name or "", [*(own_keys or ())])
                if held is None:
                    return
                self._held[name] = held
                if is_marked(held.blocks):
                    self._changed[held.digest.mark] = True
            before = name

    def _follow(self, before: Any, tokens: Sequence[int], adapter: str, keys: list[Any]) -> Held | None:
        """The block after ``before``; none where that is not known, or it depends on more than marks do."""
        if adapter and keys and keys[0] == adapter:
            keys = keys[1:]
        if before is None:
            if len(keys) > 1 or not all(isinstance(key, str) for key in keys):
                return None
            start = PrefixDigest(salt_of(keys[0] if keys else None, adapter))
            return Held(start.extended(tokens), 1, adapter)
        known = self._held.get(before)
        if known is None or keys or known.adapter != adapter:
            return None
        return Held(known.digest.extended(tokens), known.blocks + 1, adapter)

    def remove(self, names: Iterable[Any], medium: str | None) -> None:
        """Blocks were evicted; where one of the same content is left, it counts as gone as well."""
        for name in names if medium in DEVICE else ():
            if (held := self._held.pop(name, None)) is not None and is_marked(held.blocks):
                self._changed[held.digest.mark] = False

    def clear(self) -> None:
        """Nothing is known any more: the cache was emptied, or events were missed."""
        self._held.clear()
        self.forget()

    # -- reports ----------------------------------------------------------------------------------------------------

    def news(self) -> PrefixNews:
        """What the next report says."""
        if self._since == EVERYTHING:
            stored, removed = {at.digest.mark for at in self._held.values() if is_marked(at.blocks)}, set[int]()
        else:
            stored = {mark for mark, is_there in self._changed.items() if is_there}
            removed = self._changed.keys() - stored
        self._built = PrefixNews(self._since, packed_marks(stored), packed_marks(removed))
        return self._built

    def record(self, report: Report) -> None:
        """The controller has taken this report."""
        if (told := report.prefixes) is None or told is not self._built:
            return
        for marks, is_there in ((told.stored, True), (told.removed, False)):
            for mark in np.frombuffer(marks, MARK).tolist():
                if self._changed.get(mark) == is_there:
                    del self._changed[mark]
        self._since = report.sequence

    def forget(self) -> None:
        """The controller does not know what it was told, or that is no longer true: tell everything."""
        self._changed.clear()
        self._since, self._built = EVERYTHING, None
