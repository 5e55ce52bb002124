"""One open batch in memory: which lines wait, which are being served, and what came of the others."""

from collections import deque
from typing import Any

import msgspec

from controller.storage import Storage
from serving.batches.input_file import places, read_line
from serving.batches.objects import Batch, Line, LineResult

MOST_BYTES = 1 << 32  # of a stored file
STORE_S, STORE_MANY = 5.0, 256  # results are stored after so long, or when they are so many
EXPIRED = {"code": "batch_expired", "message": "The request was not served before the completion window ended."}


class Stored(msgspec.Struct):
    """A result in its file of results: the line's number, whether it is good, and what the client gets."""

    number: int
    good: bool
    line: msgspec.Raw


_stored = msgspec.json.Decoder(Stored)


class OpenBatch:
    """Lines go out by ``take`` and come back by ``put``."""

    def __init__(self, batch: Batch, content: bytes) -> None:
        self.batch, self._content = batch, content
        self._places = {place.number: place for place in places(content)}
        self._waiting = deque(self._places)
        self._serving: dict[int, str] = {}  # line -> the ingress that has it
        self._done: set[int] = set()
        self._fresh: list[bytes] = []  # results that are not stored yet
        self._parts, self._stored_s = 0, 0.0

    @property
    def total(self) -> int:
        """Its requests."""
        return len(self._places)

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting)

    @property
    def is_whole(self) -> bool:
        """Whether every request has been served."""
        return len(self._done) == len(self._places)

    def take(self, worker: str) -> Line:
        """The next line, for an ingress to serve."""
        number = self._waiting.popleft()
        self._serving[number] = worker
        line, batch = read_line(self._content, self._places[number]), self.batch
        return Line(batch.id, number, batch.tenant, batch.endpoint, line.custom_id, bytes(line.body))

    def give_up(self, worker: str) -> None:
        """An ingress is gone: its lines wait again."""
        lost = [number for number, by in self._serving.items() if by == worker]
        for number in lost:
            del self._serving[number]
        self._waiting.extendleft(reversed(lost))

    def put(self, result: LineResult) -> None:
        """A line has been served; the first result counts, if two ingresses had it."""
        if result.number in self._done or result.number not in self._places:
            return
        self._serving.pop(result.number, None)
        if result.number in self._waiting:
            self._waiting.remove(result.number)
        response = {"status_code": result.status, "request_id": result.request_id, "body": msgspec.Raw(result.body)}
        self._note(Stored(result.number, result.is_good, self._line(result.number, response, None)))

    def _line(self, number: int, response: Any, error: Any) -> msgspec.Raw:
        """A line of an output file."""
        custom_id = read_line(self._content, self._places[number]).custom_id
        told = {"id": f"batch_req_{self.batch.id.removeprefix('batch_')}-{number}", "custom_id": custom_id}
        return msgspec.Raw(msgspec.json.encode({**told, "response": response, "error": error}))

    def _note(self, stored: Stored) -> None:
        self._done.add(stored.number)
        self.batch.completed += stored.good
        self.batch.failed += not stored.good
        self._fresh.append(msgspec.json.encode(stored))

    def store(self, storage: Storage, now_s: float) -> None:
        """Write results that are old enough, or many."""
        if self._fresh and (now_s - self._stored_s > STORE_S or len(self._fresh) >= STORE_MANY):
            self._write(storage)
            self._stored_s = now_s

    def _write(self, storage: Storage) -> None:
        storage.write(f"results/{self.batch.id}/{self._parts:08d}", b"\n".join(self._fresh))
        self._fresh.clear()
        self._parts += 1

    def restore(self, storage: Storage) -> None:
        """Take up what an earlier keeper has stored of it."""
        self.batch.completed = self.batch.failed = 0
        for stored in self._read(storage):
            if stored.number in self._places and stored.number not in self._done:
                self._note(stored)
        self._fresh.clear()
        self._waiting = deque(number for number in self._places if number not in self._done)

    def _read(self, storage: Storage) -> list[Stored]:
        """What is stored of it; half a file, which only a fault of the storage leaves, counts as nothing."""
        folder, found = f"results/{self.batch.id}", list[Stored]()
        names = sorted(name for name in storage.names(folder) if name.isdigit())
        self._parts = int(names[-1]) + 1 if names else 0
        for name in names:
            try:
                found += [_stored.decode(line) for line in storage.read(f"{folder}/{name}", MOST_BYTES).split(b"\n")]
            except (ValueError, msgspec.MsgspecError):
                continue
        return found

    def files(self, storage: Storage, now_s: float, is_expired: bool) -> tuple[bytes, bytes]:
        """The output file and the error file, in the order of the input."""
        if is_expired:
            for number in self._places.keys() - self._done:
                self._note(Stored(number, False, self._line(number, None, EXPIRED)))
        if self._fresh:
            self._write(storage)
        ordered = sorted({stored.number: stored for stored in self._read(storage)}.items())
        good, bad = (b"".join(bytes(s.line) + b"\n" for _, s in ordered if s.good is kind) for kind in (True, False))
        return good, bad
