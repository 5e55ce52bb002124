"""All files and batches of an application: what is stored, what is open, who serves which line. Blocks on its storage.

``files/ID.json`` and ``files/ID`` are a file and its content, ``open/ID.json`` and ``ended/ID.json`` batches,
``results/ID/NUMBER`` what has been served of an open one. So a new keeper goes on where the last one ended: a line is
served again only if its result was not stored yet. Storage changes first, memory after it. Times are arguments, of one
clock, in seconds since 1970.
"""

import logging
import math
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import msgspec

from controller.storage import without_secrets
from serving.batches.file_book import LOST, OUTPUT, FileBook
from serving.batches.input_file import check
from serving.batches.input_lines import InputLines, InputLostError
from serving.batches.objects import WINDOW_S, Batch, BatchError, Line, LineError, LineResult, State, StoredFile
from serving.batches.open_batch import OpenBatch
from serving.batches.wanted import Page, page_of, read_wanted
from serving.config.batches import BatchOptions

logger = logging.getLogger("polyslo.batches")

SILENT_S = 20.0  # an ingress that has not asked for so long serves its lines no more
LONGEST_TICK_S = 5.0  # of the time between two ticks, so much counts as silence: the keeper may have been busy
MOST_BATCHES = 1_000  # of a tenant
FAULT_S = 30.0  # a batch with which the storage has failed is left alone for so long
TIMED = frozenset({"add_file", "create", "cancel", "give", "take_back"})  # methods that take the time

Told = TypeVar("Told")


class Given(NamedTuple):
    """What an ingress is to serve, and the batches of which it need serve nothing any more."""

    lines: list[Line]
    ended: list[str]


def answer(book: "BatchBook", method: str, arguments: Sequence[Any], now_s: float) -> Any:
    """What a method of the book answers at this time."""
    return getattr(book, method)(*arguments, **({"now_s": now_s} if method in TIMED else {}))


class BatchBook(FileBook):
    """The batches, beside their files. Where the storage fails with one of them, the others go on."""

    def __init__(self, options: BatchOptions, application: str) -> None:
        super().__init__(options, application)
        ended, going = self._load("ended", Batch), self._load("open", Batch)
        listed = sorted(going + ended, key=lambda batch: batch.created_s)
        self.batches = {batch.id: batch for batch in listed} | {batch.id: batch for batch in ended}
        self._going = {batch.id: batch for batch in self.batches.values() if batch.state == "in_progress"}
        self._open: dict[str, OpenBatch] = {}  # whose lines are known: the first of each tenant
        self._silent_s: dict[str, float] = {}  # for how long each ingress has not asked
        self._failed_s: dict[str, float] = {}  # batches that are left alone, and since when
        self._ticked_s = 0.0
        self._tenants: list[str] = []  # of open batches, whose turn it is first
        self._clear([batch.id for batch in ended])

    def _clear(self, ended: Sequence[str]) -> None:
        """Remove what a keeper that ended between two changes of the storage has left."""
        for name in self._storage.names("files"):
            if name.partition(".")[0] not in self.files:
                self._storage.remove(f"files/{name}")
        for batch_id in {name.removesuffix(".json") for name in self._storage.names("open")} & {*ended}:
            self._remove_open(batch_id)

    def _remove_open(self, batch_id: str) -> None:
        self._storage.remove_folder(f"results/{batch_id}")
        self._storage.remove(f"open/{batch_id}.json")  # last: it tells the next keeper that something is left

    def remove_file(self, tenant: str, file_id: str) -> dict[str, Any]:
        """Remove a file that no open batch reads."""
        found = self.file(tenant, file_id)
        users = [batch.id for batch in self._going.values() if batch.input_file_id == file_id]
        if users:
            raise BatchError(409, f"Batch {users[0]} reads this file; cancel it first.", "file_id", "file_in_use")
        self._drop(found)
        return {"id": file_id, "object": "file", "deleted": True}

    def stored_bytes(self, tenant: str) -> int:
        """Of all files of this tenant, and of what its open batches have come to."""
        return super().stored_bytes(tenant) + sum(
            batch.result_bytes for batch in self._going.values() if batch.tenant == tenant
        )

    # -- batches ----------------------------------------------------------------------------------------------------

    def create(self, tenant: str, wanted: dict[str, Any], now_s: float) -> dict[str, Any]:
        """Open a batch; one whose file has a mistake has failed at once, and says where."""
        asked = read_wanted(wanted)
        if sum(batch.tenant == tenant for batch in self.batches.values()) >= MOST_BATCHES:
            told = f"There may be {MOST_BATCHES} batches, ended ones included."
            raise BatchError(429, told, None, "too_many_batches", self._place_after_s(tenant, now_s))
        if self.stored_bytes(tenant) >= self.options.tenant_bytes:
            told = f"The files have {self.options.tenant_bytes} bytes: there is no room for results; delete some."
            raise BatchError(413, told, None, "storage_full")
        file_id, expires_s = asked.input_file_id, int(now_s + WINDOW_S)
        checked = check(self._input(tenant, file_id), asked.endpoint, self.options)
        batch = Batch(f"batch_{secrets.token_hex(12)}", tenant, asked.endpoint, file_id, int(now_s), expires_s)
        batch.metadata, batch.output_expires_after_s = asked.metadata, asked.expires_after_s
        if checked.errors:
            batch.state, batch.ended_s, batch.errors = "failed", int(now_s), checked.errors
            self._storage.write(f"ended/{batch.id}.json", msgspec.json.encode(batch))
        else:
            batch.total = checked.requests
            self._storage.write(f"open/{batch.id}.json", msgspec.json.encode(batch))
            self._going[batch.id] = batch
        self.batches[batch.id] = batch
        return batch.shown()

    def _place_after_s(self, tenant: str, now_s: float) -> int:
        """Seconds until the first batch of a tenant is forgotten; it may have to end before."""
        ends = [batch.ended_s or batch.expires_s for batch in self.batches.values() if batch.tenant == tenant]
        return max(1, math.ceil(min(ends) + self.options.keep_s - now_s))

    def batch(self, tenant: str, batch_id: str) -> Batch:
        """A batch of this tenant; others do not exist for it."""
        found = self.batches.get(batch_id)
        if found is None or found.tenant != tenant:
            raise BatchError(404, f"No such batch: {batch_id[:64]!r}.", "batch_id", "not_found")
        return found

    def list_batches(self, tenant: str, page: Page) -> dict[str, Any]:
        """All batches that are kept."""
        return page_of([batch for batch in self.batches.values() if batch.tenant == tenant], page)

    def cancel(self, tenant: str, batch_id: str, now_s: float) -> dict[str, Any]:
        """End an open batch; what has been served of it can be had."""
        batch = self.batch(tenant, batch_id)
        if batch.state != "in_progress":
            told = f"Batch {batch.id} is {batch.state} and cannot be cancelled."
            raise BatchError(409, told, "batch_id", "batch_ended")
        if (opened := self._opened(batch, now_s)) is not None:
            self._end(opened, "cancelled", now_s)
        return batch.shown()

    # -- lines ------------------------------------------------------------------------------------------------------

    def give(self, worker: str, count: int, held: Collection[tuple[str, int]], now_s: float) -> Given:
        """Up to ``count`` lines for an ingress that holds the lines ``held`` (batch and number).

        Tenants take turns, and none has more than its part of an ingress while others wait. Their oldest batch goes
        first. A line that was given and is not held got lost on its way: it waits again.
        """
        self._silent_s[worker] = 0.0
        for batch_id in self._open.keys() | ({each for each, _ in held} & self._going.keys()):
            if (opened := self._reached(self._going[batch_id], now_s)) is not None:
                opened.hold(worker, {number for own_id, number in held if own_id == batch_id})
        self.tick(now_s)
        first: dict[str, OpenBatch] = {}
        for batch in list(self._going.values()):
            if batch.tenant in first or batch.id in self._failed_s:
                continue
            if (found := self._reached(batch, now_s)) and found.has_waiting(now_s):
                first[batch.tenant] = found
        self._tenants = [t for t in self._tenants if t in first] + [t for t in first if t not in self._tenants]
        own = Counter(self.batches[batch_id].tenant for batch_id, _ in held if batch_id in self.batches)
        part = math.ceil((len(held) + count) / max(1, len(self._tenants)))
        lines, turns = list[Line](), [tenant for tenant in self._tenants if own[tenant] < part]
        while len(lines) < count and turns:
            tenant = turns.pop(0)
            taken = self._tried(first[tenant].batch, partial(first[tenant].take, worker), now_s)
            if taken is None:
                continue
            lines.append(taken)
            own[tenant] += 1
            if first[tenant].has_waiting(now_s) and own[tenant] < part:
                turns.append(tenant)
        self._tenants = turns + [tenant for tenant in self._tenants if tenant not in turns]
        return Given(lines, sorted({batch_id for batch_id, _ in held} - self._going.keys()))

    def take_back(
        self, worker: str, results: Sequence[LineResult], unserved: Sequence[tuple[str, int]], now_s: float
    ) -> None:
        """What an ingress has served, and the lines for which it found no room.

        Results of ended batches are too late; lines of one that cannot be read at present are served again.
        """
        self._silent_s[worker] = 0.0
        for result in results:
            if (batch := self._going.get(result.batch_id)) and (opened := self._reached(batch, now_s)):
                self._tried(batch, partial(opened.put, result, batch.id not in self._failed_s), now_s)
        for batch_id, number in unserved:
            if (batch := self._going.get(batch_id)) and (opened := self._reached(batch, now_s)):
                opened.hand_back(number, now_s)
        self.tick(now_s)

    def tick(self, now_s: float) -> None:
        """What time brings: ingresses that are gone, batches that end, results that are stored."""
        passed_s = min(max(0.0, now_s - self._ticked_s), LONGEST_TICK_S) if self._ticked_s else 0.0
        self._ticked_s = now_s
        self._silent_s = {worker: silent_s + passed_s for worker, silent_s in self._silent_s.items()}
        for worker in [each for each, silent_s in self._silent_s.items() if silent_s > SILENT_S]:
            del self._silent_s[worker]
            for opened in self._open.values():
                opened.give_up(worker)
        self._failed_s = {each: at_s for each, at_s in self._failed_s.items() if 0.0 <= now_s - at_s < FAULT_S}
        for batch in [each for each in self._going.values() if each.id not in self._failed_s]:
            self._tried(batch, partial(self._look_after, batch, now_s), now_s)

    def _look_after(self, batch: Batch, now_s: float) -> None:
        """End a batch where that is due, or store what came of it."""
        known = self._open.get(batch.id)
        if known is not None and known.is_whole:
            self._end(known, "completed", now_s)
        elif now_s >= batch.expires_s:
            if (late := self._opened(batch, now_s)) is not None:
                self._end(late, "expired", now_s)
        elif known is not None and known.has_grown and self.stored_bytes(batch.tenant) > self.options.tenant_bytes:
            told = f"With its results, files have more than {self.options.tenant_bytes} bytes (batches.tenant_bytes)."
            self._end(known, "failed", now_s, [LineError("results_too_large", told)])
        elif known is not None:
            known.has_grown = False
            known.store(self._storage, now_s)

    def _leave_alone(self, batch: Batch, error: OSError, now_s: float) -> None:
        self._failed_s[batch.id] = now_s
        told = without_secrets(f"{type(error).__name__}: {error}".splitlines()[0], self.options.storage)
        logger.error("batch %s rests for %g s, because its storage fails: %s", batch.id, FAULT_S, told)

    def _reached(self, batch: Batch, now_s: float) -> OpenBatch | None:
        """``_opened``, but None while the storage fails with it."""
        if batch.id in self._failed_s:
            return self._open.get(batch.id)
        return self._tried(batch, partial(self._opened, batch, now_s), now_s)

    def _tried(self, batch: Batch, step: Callable[[], Told], now_s: float) -> Told | None:
        """What a step with this batch returns; None where the storage fails, so that the batch is left alone, or its
        file is lost, which is its end."""
        try:
            try:
                return step()
            except InputLostError as error:
                self._fail(batch, error, now_s)
        except OSError as error:
            self._leave_alone(batch, error, now_s)
        return None

    def _opened(self, batch: Batch, now_s: float) -> OpenBatch | None:
        """An open batch, whose lines may have to be found first; None where its file is lost, which is its end."""
        if batch.id not in self._open:
            try:
                opened = OpenBatch(batch, InputLines.found(self._storage, f"files/{batch.input_file_id}", batch.total))
            except InputLostError as error:
                self._fail(batch, error, now_s)
                return None
            opened.restore(self._storage)
            self._open[batch.id] = opened
        return self._open[batch.id]

    def _fail(self, batch: Batch, error: InputLostError, now_s: float) -> None:
        """End a batch whose input file is lost; what has been served of it can be had."""
        logger.error("batch %s: its input file %s", batch.id, error)
        if (opened := self._open.get(batch.id)) is None:
            opened = OpenBatch(batch, InputLines(self._storage, "", ()))
            opened.take_stock(self._storage)
        self._end(opened, "failed", now_s, [LineError(LOST, f"The input file {error}.")])

    def _end(self, opened: OpenBatch, state: State, now_s: float, errors: Sequence[LineError] = ()) -> None:
        batch = opened.batch
        opened.store_all(self._storage, now_s)
        late = opened.late() if state == "expired" else []
        changes: dict[str, Any] = {"state": state, "ended_s": int(now_s), "failed": batch.failed + len(late)}
        changes["errors"] = [*batch.errors, *errors]
        for name, count in (("output", batch.completed), ("error", changes["failed"])):
            file_id = f"file-{batch.id.removeprefix('batch_')}-{name}"  # the same if a keeper ends between the two
            if file_id in self.files and file_id in opened.whole and not late:  # an earlier try has stored it
                changes[f"{name}_file_id"] = file_id
                continue
            lines = opened.lines(self._storage, name == "output", late)
            if first := next(lines, b"") if count or state == "failed" else b"":  # uncounted where the input is lost
                told = StoredFile(file_id, batch.tenant, f"{batch.id}_{name}.jsonl", OUTPUT, 0, int(now_s))
                told.expires_s = self.expires_s(batch.output_expires_after_s, now_s)
                self._keep(told, chain((first,), lines))
                opened.whole |= set() if late else {file_id}
                changes[f"{name}_file_id"] = file_id
        opened.has_grown = False
        ended = msgspec.structs.replace(batch, **changes)
        self._storage.write(f"ended/{batch.id}.json", msgspec.json.encode(ended))
        for name, value in changes.items():
            setattr(batch, name, value)
        self._going.pop(batch.id, None)
        self._open.pop(batch.id, None)
        self._remove_open(batch.id)

    def forget(self, now_s: float) -> None:
        """Remove what has expired or is older than files are kept, but for what an open batch reads."""
        self._drop_old({batch.input_file_id for batch in self._going.values()}, now_s)
        for batch in [each for each in self.batches.values() if 0 < each.ended_s < now_s - self.options.keep_s]:
            self._storage.remove(f"ended/{batch.id}.json")
            del self.batches[batch.id]
