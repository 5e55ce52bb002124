"""Of requests that may lose their places, those of each slot for which others would be taken first. Pure."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from controller.placement import Pending

Entry = tuple[float, int]  # by what it is put in order, and its uid
SPARE = 64  # entries of requests that have left, beside as many as there are, before they are cleared away


@dataclass
class Movable:
    """Looked up by slot in time that does not grow with the requests there.

    Entries of requests that have left stay until they come to the top; ``find`` tells by its uid which request still
    may be moved, or none.
    """

    find: Callable[[int], Pending | None]
    _longest: dict[int, list[Entry]] = field(default_factory=dict)  # heaps by slot: less the prompt's tokens
    _least: dict[int, list[Entry]] = field(default_factory=dict)  # heaps by slot: value

    def add(self, p: Pending) -> None:
        """A request with a place may be moved from now on."""
        uid = int(p.row["id"])
        heapq.heappush(self._longest.setdefault(p.slot, []), (-float(p.request.prompt_tokens), uid))
        heapq.heappush(self._least.setdefault(p.slot, []), (float(p.row["value"]), uid))

    def by_slot(self, count: int) -> list[tuple[int, float, float]]:
        """Each slot with requests that may be moved: the most prompt tokens of one, and the least value of one.

        ``count``: how many requests there are.
        """
        found = []
        for slot in list(self._longest):
            longest, least = self._longest[slot], self._least[slot]
            for heap in (longest, least):
                if len(heap) > 2 * count + SPARE:
                    heap[:] = {entry for entry in heap if self._is_on(entry[1], slot)}
                    heapq.heapify(heap)
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
