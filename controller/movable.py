"""Of requests that may lose their places, those of each slot for which others would be taken first. Pure."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from controller.placement import Pending

Entry = tuple[float, int]  # by what it is put in order, and its uid
SPARE = 64  # entries of requests that have left, beside as many as there were, before they are cleared away


@dataclass
class Movable:
    """Looked up by slot in time that does not grow with the requests there.

    Entries of requests that have left stay until they come to the top or are cleared away; ``find`` tells by its uid
    which request still may be moved, or none.
    """

    find: Callable[[int], Pending | None]
    _longest: dict[int, list[Entry]] = field(default_factory=dict)  # heaps by slot: less the prompt's tokens
    _least: dict[int, list[Entry]] = field(default_factory=dict)  # heaps by slot: value
    _most: dict[int, int] = field(default_factory=dict)  # by slot: entries from which on they are cleared

    def add(self, p: Pending) -> None:
        """A request with a place may be moved from now on. Where all find places nobody asks which: what has left is
        cleared away here."""
        uid, slot = int(p.row["id"]), p.slot
        longest, least = self._longest.setdefault(slot, []), self._least.setdefault(slot, [])
        heapq.heappush(longest, (-float(p.request.prompt_tokens), uid))
        heapq.heappush(least, (float(p.row["value"]), uid))
        if max(len(longest), len(least)) > self._most.get(slot, SPARE):
            for heap in (longest, least):
                heap[:] = {entry for entry in heap if self._is_on(entry[1], slot)}
                heapq.heapify(heap)
            self._most[slot] = 2 * len(longest) + SPARE

    def by_slot(self) -> list[tuple[int, float, float]]:
        """Each slot with requests that may be moved: the most prompt tokens of one, and the least value of one."""
        found = []
        for slot in list(self._longest):
            longest, least = self._longest[slot], self._least[slot]
            for heap in (longest, least):
                while heap and not self._is_on(heap[0][1], slot):
                    heapq.heappop(heap)
            if longest:
                found.append((slot, -longest[0][0], least[0][0]))
            else:
                del self._longest[slot], self._least[slot]
        return found

    def _is_on(self, uid: int, slot: int) -> bool:
        p = self.find(uid)
        return p is not None and p.slot == slot
