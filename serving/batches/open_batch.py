"""One open batch: which lines wait, which are being served, and what came of the others."""

from bisect import insort
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import msgspec

from controller.storage import Storage
from serving.batches.input_lines import InputLines
from serving.batches.objects import Batch, Line, LineResult
from serving.batches.results import Results, Stored

MOST_BYTES = 1 << 32  # of a stored file
REST_S, LONGEST_REST_S = 4.0, 30.0  # of a line that came back because the fleet was full; twice that the next time
EXPIRED = {"code": "batch_expired", "message": "The request was not served before the completion window ended."}


class OpenBatch:
    """Lines go out by ``take`` and come back by ``put``, or by ``hand_back`` to be served later.

    Where a line cannot be read (``InputLines.line``), ``take`` and ``put`` change nothing.
    """

    def __init__(self, batch: Batch, lines: InputLines) -> None:
        self.batch, self._lines = batch, lines
        self._waiting = deque(lines.numbers)
        self._resting = deque[tuple[float, int]]()  # until when, and which line; the first ends first
        self._serving: dict[int, str] = {}  # line -> the ingress that has it
        self._custom_ids: dict[int, str] = {}  # of lines that are being served, as far as this keeper has read them
        self._rests_s: dict[int, float] = {}  # line -> how long it rested the last time
        self._done: set[int] = set()
        self.has_grown = False  # since its tenant's room was looked at
        self.whole = set[str]()  # output files that have been stored, and to which nothing has come since
        self._results = Results(batch.id)

    def has_waiting(self, now_s: float) -> bool:
        """Whether a line may be taken. Where the clock was set back, no line rests any more."""
        resting = self._resting
        while resting and (resting[0][0] <= now_s or resting[-1][0] > now_s + LONGEST_REST_S):
            self._waiting.append(resting.popleft()[1])
        return bool(self._waiting)

    @property
    def is_whole(self) -> bool:
        """Whether every request has been served."""
        return len(self._done) == len(self._lines)

    def take(self, worker: str) -> Line:
        """The next line, for an ingress to serve."""
        number, batch = self._waiting[0], self.batch
        line = self._lines.line(number)
        self._waiting.popleft()
        self._serving[number], self._custom_ids[number] = worker, line.custom_id
        return Line(batch.id, number, batch.tenant, batch.endpoint, line.custom_id, bytes(line.body))

    def give_up(self, worker: str, held: Collection[int] = ()) -> None:
        """An ingress serves none of its lines but those ``held``: the others wait again."""
        lost = [number for number, by in self._serving.items() if by == worker and number not in held]
        for number in lost:
            self._no_more_served(number)
        self._waiting.extendleft(reversed(lost))

    def hold(self, worker: str, held: Collection[int]) -> None:
        """An ingress serves these lines, some of which an earlier keeper gave it, and no others."""
        self.give_up(worker, held)
        unknown = [number for number in held if number not in self._serving and number not in self._done]
        if unknown and (taken := set(self._waiting).intersection(unknown)):
            self._serving |= dict.fromkeys(taken, worker)
            self._waiting = deque(number for number in self._waiting if number not in taken)

    def _no_more_served(self, number: int) -> bool:
        """Nobody has this line now; whether somebody had it."""
        self._custom_ids.pop(number, None)
        return self._serving.pop(number, None) is not None

    def hand_back(self, number: int, now_s: float) -> None:
        """A line found no room: others go first, and it rests for longer each time."""
        if self._no_more_served(number):
            rest_s = self._rests_s[number] = min(2.0 * self._rests_s.get(number, REST_S / 2.0), LONGEST_REST_S)
            insort(self._resting, (now_s + rest_s, number))

    def put(self, result: LineResult, may_read: bool) -> None:
        """A line has been served; the first result counts, if two ingresses had it. One whose line would have to be
        read first is dropped unless it ``may_read``."""
        if result.number in self._done or result.number not in self._lines:
            return
        if not may_read and result.number not in self._custom_ids:
            return
        response = {"status_code": result.status, "request_id": result.request_id, "body": msgspec.Raw(result.body)}
        stored = Stored(result.number, result.is_good, self._line(result.number, response, None))
        if not self._no_more_served(result.number):  # it was given up, and waits again
            self._waiting = deque(number for number in self._waiting if number != result.number)
            self._resting = deque(each for each in self._resting if each[1] != result.number)
        self._note(stored)
        self._results.add(stored)
        self.has_grown = True
        self.whole.clear()

    def _line(self, number: int, response: Any, error: Any) -> msgspec.Raw:
        """A line of an output file."""
        custom_id = self._custom_ids.get(number) or self._lines.line(number).custom_id
        told = {"id": f"batch_req_{self.batch.id.removeprefix('batch_')}-{number}", "custom_id": custom_id}
        return msgspec.Raw(msgspec.json.encode({**told, "response": response, "error": error}))

    def _note(self, stored: Stored) -> None:
        self._done.add(stored.number)
        self.batch.completed += stored.good
        self.batch.failed += not stored.good
        self.batch.result_bytes += len(bytes(stored.line))

    def store(self, storage: Storage, now_s: float) -> None:
        """Write results that are old enough, or fill a file, and how far the batch has come."""
        if self._results.store(storage, now_s):
            storage.write(f"open/{self.batch.id}.json", msgspec.json.encode(self.batch))

    def restore(self, storage: Storage) -> None:
        """Take up what an earlier keeper has stored of it."""
        self.batch.completed = self.batch.failed = self.batch.result_bytes = 0
        for stored in self._results.restore(storage):
            if stored.number in self._lines and stored.number not in self._done:
                self._note(stored)
        self._waiting = deque(number for number in self._lines.numbers if number not in self._done)

    def take_stock(self, storage: Storage) -> None:
        """Learn which results are stored of a batch whose lines cannot be read: all are to be had."""
        deque(self._results.restore(storage), maxlen=0)

    def late(self) -> list[int]:
        """The lines that have not been served."""
        return [number for number in self._lines.numbers if number not in self._done]

    def lines(self, storage: Storage, is_good: bool, late: Sequence[int]) -> Iterator[bytes]:
        """The output file, or the error file with lines that are ``late``, in the order of the input."""
        expired = (Stored(number, False, self._line(number, None, EXPIRED)) for number in ([] if is_good else late))
        for stored in self._results.in_order(storage, expired):
            if stored.good is is_good:
                yield bytes(stored.line) + b"\n"

    def store_all(self, storage: Storage, now_s: float) -> None:
        """Write all results, before ``lines``."""
        self._results.store(storage, now_s, is_last=True)
