"""LoRA adapters of one replica, by what it was given: no report tells of them, and no promise rests on them. Pure."""

from collections import OrderedDict
from collections.abc import Hashable

import numpy as np

SPARE = 64  # users that have left, beside as many as the replica has requests, before they are cleared away


class HeldAdapters:
    """The adapters that a replica presumably holds, least recently used first out, with the requests that use them."""

    def __init__(self) -> None:
        self._uids: OrderedDict[str, set[int]] = OrderedDict()
        self._in_use, self._with_objective = set[str](), set[str]()
        self._version: Hashable = None  # of the requests, when they were last gone through

    def __contains__(self, adapter: str) -> bool:
        return adapter in self._uids

    def __len__(self) -> int:
        return len(self._uids)

    def record(self, adapter: str, uid: int, most: int, ids: np.ndarray) -> None:
        """A request for this adapter was given to the replica, which holds ``most`` of them; ``ids`` (i8[n]) are all of
        its requests."""
        self._version = None
        users = self._uids.setdefault(adapter, set())
        users.add(uid)
        if len(users) > 2 * len(ids) + SPARE:  # while few adapters are there, nobody asks which are in use
            users &= {uid, *ids.tolist()}
        self._uids.move_to_end(adapter)
        while len(self._uids) > most:
            self._uids.popitem(last=False)

    def in_use(self, ids: np.ndarray, is_best_effort: np.ndarray, version: Hashable) -> tuple[set[str], set[str]]:
        """Adapters of requests that the replica still has, and those of them that not only best effort uses; ``ids``
        (i8[n]) are all of those, as of a ``version``: they are gone through once for each."""
        if version != self._version:
            live, with_objective = set(ids.tolist()), set(ids[~is_best_effort].tolist())
            for uids in self._uids.values():
                uids &= live
            self._in_use = {adapter for adapter, uids in self._uids.items() if uids}
            self._with_objective = {adapter for adapter in self._in_use if self._uids[adapter] & with_objective}
            self._version = version
        return self._in_use, self._with_objective
