"""LoRA adapters of one replica, by what it was given: no report tells of them, and no promise rests on them. Pure."""

from collections import OrderedDict

import numpy as np


class HeldAdapters:
    """The adapters that a replica presumably holds, least recently used first out, with the requests that use them."""

    def __init__(self) -> None:
        self._uids: OrderedDict[str, set[int]] = OrderedDict()

    def __contains__(self, adapter: str) -> bool:
        return adapter in self._uids

    def __len__(self) -> int:
        return len(self._uids)

    def record(self, adapter: str, uid: int, most: int) -> None:
        """A request for this adapter was given to the replica, which holds ``most`` of them."""
        self._uids.setdefault(adapter, set()).add(uid)
        self._uids.move_to_end(adapter)
        while len(self._uids) > most:
            self._uids.popitem(last=False)

    def in_use(self, ids: np.ndarray) -> set[str]:
        """Adapters of requests that the replica still has; ``ids`` (i8[n]) are all of those."""
        live = set(ids.tolist())
        for uids in self._uids.values():
            uids &= live
        return {adapter for adapter, uids in self._uids.items() if uids}
