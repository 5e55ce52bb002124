"""What came of the lines of one open batch: written as it comes, and read again in the order of the input.

A file holds the results of about ``PART`` lines, by their numbers. Only the last one, which still grows, is in memory.
"""

import heapq
from collections.abc import Iterable, Iterator
from itertools import pairwise
from operator import attrgetter

import msgspec

from controller.storage import Storage

STORE_S, PART = 5.0, 256  # results are stored after so long, in files of so many
PART_BYTES = 4 << 20  # or of so many bytes


class Stored(msgspec.Struct):
    """A result in its file of results: the line's number, whether it is good, and what the client gets."""

    number: int
    good: bool
    line: msgspec.Raw


_stored = msgspec.json.Decoder(Stored)


class Results:
    """The results that are stored, and those that will be."""

    def __init__(self, batch_id: str) -> None:
        self._folder = f"results/{batch_id}"
        self._part: dict[int, bytes] = {}  # of the last file, by number
        self._part_bytes = self._parts = 0
        self._firsts: dict[str, int] = {}  # number of the first line in each file
        self._stored_s, self.is_stored = 0.0, True

    def add(self, stored: Stored) -> None:
        """One more."""
        encoded = self._part[stored.number] = msgspec.json.encode(stored)
        self._part_bytes += len(encoded)
        self.is_stored = False

    def store(self, storage: Storage, now_s: float, is_last: bool = False) -> bool:
        """Write results that are old enough, or fill a file; whether there was something to write."""
        is_full = len(self._part) >= PART or self._part_bytes >= PART_BYTES
        is_young = 0.0 <= now_s - self._stored_s <= STORE_S  # or the clock was set back
        if self.is_stored or (is_young and not is_last and not is_full):
            return False
        name, ordered = f"{self._parts:08d}", sorted(self._part)
        pieces = (b"\n" + self._part[number] if place else self._part[number] for place, number in enumerate(ordered))
        storage.write_pieces(f"{self._folder}/{name}", pieces)
        self._firsts[name], self._stored_s, self.is_stored = ordered[0], now_s, True
        if is_full:
            self._part, self._part_bytes, self._parts = {}, 0, self._parts + 1
        return True

    def restore(self, storage: Storage) -> Iterator[Stored]:
        """What an earlier keeper has stored, which is gone on from; half a file, which only a fault of the storage
        leaves, counts as nothing."""
        for name in self._names(storage):
            self._parts = int(name) + 1
            try:
                found = [_stored.decode(line) for line in storage.lines(f"{self._folder}/{name}")]
            except msgspec.MsgspecError:
                storage.remove(f"{self._folder}/{name}")
                continue
            if any(later.number < each.number for each, later in pairwise(found)):  # as earlier versions wrote them
                found.sort(key=attrgetter("number"))
                storage.write(f"{self._folder}/{name}", b"\n".join(map(msgspec.json.encode, found)))
            self._firsts[name] = found[0].number if found else 0
            yield from found

    def in_order(self, storage: Storage, others: Iterable[Stored]) -> Iterator[Stored]:
        """All that is stored, and ``others``, which are in order. A file is open while its lines have their turn."""
        files = (self._read(storage, name) for name in self._names(storage))
        last = None  # two keepers may have stored the same line in an object store, which has no claim
        for stored in heapq.merge(others, *files, key=attrgetter("number")):
            if stored.line and stored.number != last:
                last = stored.number
                yield stored

    def _read(self, storage: Storage, name: str) -> Iterator[Stored]:
        yield Stored(self._firsts.get(name, 0), False, msgspec.Raw())  # its turn has come: only now it is opened
        try:
            yield from map(_stored.decode, storage.lines(f"{self._folder}/{name}"))
        except msgspec.MsgspecError:
            return

    def _names(self, storage: Storage) -> list[str]:
        return sorted(name for name in storage.names(self._folder) if name.isdigit())
