"""The input file of an open batch, whose lines are read from storage when they are wanted.

In memory are the places of the lines and one window of the file: lines are mostly wanted in order, and an object store
takes long for each question.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence

import msgspec

from controller.storage import Storage
from serving.batches.input_file import InputLine, Place, numbered, read_line

WINDOW = 1 << 18  # bytes that are read at a time; a longer line is read whole


class InputLostError(Exception):
    """The input file is missing, or is not the one that was checked."""


class InputLines:
    """Lines by their numbers. Methods raise ``OSError`` where the storage fails at present."""

    def __init__(self, storage: Storage, path: str, places: Iterable[Place]) -> None:
        self._storage, self._path = storage, path
        self._numbers, self._begins, self._ends = array("q"), array("q"), array("q")
        for place in places:
            self._numbers.append(place.number)
            self._begins.append(place.begin)
            self._ends.append(place.end)
        self._window, self._window_begins = b"", 0

    @classmethod
    def found(cls, storage: Storage, path: str, count: int) -> "InputLines":
        """The lines of this file, which had so many when it was checked; it is read once. Raises ``InputLostError``."""
        try:
            lines = cls(storage, path, (place for place, _ in numbered(storage.lines(path))))
        except FileNotFoundError:
            raise InputLostError("is missing") from None
        if len(lines) != count:
            raise InputLostError(f"has {len(lines)} requests, and had {count} when it was checked")
        return lines

    @property
    def numbers(self) -> Sequence[int]:
        """Of all lines, in order."""
        return self._numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __contains__(self, number: int) -> bool:
        at = bisect_left(self._numbers, number)
        return at < len(self._numbers) and self._numbers[at] == number

    def line(self, number: int) -> InputLine:
        """One of the lines; raises ``InputLostError``."""
        at = bisect_left(self._numbers, number)
        begin, end = self._begins[at], self._ends[at]
        if begin < self._window_begins or end > self._window_begins + len(self._window):
            self._read(begin, end)
        begins = self._window_begins
        try:
            return read_line(self._window[begin - begins : end - begins])
        except (msgspec.MsgspecError, RecursionError, UnicodeError):
            raise InputLostError("has changed since it was checked") from None

    def _read(self, begin: int, end: int) -> None:
        try:
            self._window = self._storage.read_part(self._path, begin, max(WINDOW, end - begin))
        except FileNotFoundError:
            raise InputLostError("is missing") from None
        self._window_begins = begin
