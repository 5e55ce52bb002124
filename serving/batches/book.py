"""All files and batches of an application: what is stored, what is open, who serves which line. Blocks on its storage.

``files/ID.json`` and ``files/ID`` are a file and its content, ``open/ID.json`` and ``ended/ID.json`` batches,
``results/ID/NUMBER`` what has been served of an open one. So a new keeper goes on where the last one ended: a line is
served again only if its result was not stored yet. Times are arguments, in seconds since 1970.
"""

import logging
import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from controller.storage import Storage, folder_of
from serving.batches.input_file import check
from serving.batches.objects import (
    ENDPOINTS,
    WINDOW,
    WINDOW_S,
    Batch,
    BatchError,
    Line,
    LineResult,
    State,
    StoredFile,
)
from serving.batches.open_batch import MOST_BYTES, OpenBatch
from serving.config.batches import BatchOptions

logger = logging.getLogger("polyslo.batches")

SILENT_S = 20.0  # an ingress that has not asked for so long serves its lines no more
MOST_LISTED, USUAL_LISTED = 100, 20
MOST_METADATA, LONGEST_KEY, LONGEST_VALUE = 16, 64, 512
INPUT, OUTPUT = "batch", "batch_output"

Kind = TypeVar("Kind", bound=msgspec.Struct)


class Given(NamedTuple):
    """What an ingress is to serve, and the batches of which it need serve nothing any more."""

    lines: list[Line]
    ended: list[str]


class BatchBook:
    """One at a time may use a storage: on a file system another one is an ``OSError``."""

    def __init__(self, options: BatchOptions, application: str) -> None:
        self.options = options
        self._storage = Storage(options.storage, folder_of(application), "batches")
        self._storage.claim()
        self.files = {each.id: each for each in self._load("files", StoredFile)}
        ended, going = self._load("ended", Batch), self._load("open", Batch)
        listed = sorted(going + ended, key=lambda batch: batch.created_s)
        self.batches = {batch.id: batch for batch in listed} | {batch.id: batch for batch in ended}
        self._open: dict[str, OpenBatch] = {}  # whose lines are in memory: the first of each tenant
        self._seen_s: dict[str, float] = {}  # when each ingress asked last
        self._tenants: list[str] = []  # of open batches, whose turn it is first

    def close(self) -> None:
        """Let another book use the storage."""
        self._storage.release()

    def _load(self, folder: str, kind: type[Kind]) -> list[Kind]:
        found = []
        for name in self._storage.names(folder):
            if name.endswith(".json"):
                try:
                    found.append(msgspec.json.decode(self._storage.read(f"{folder}/{name}", MOST_BYTES), type=kind))
                except (ValueError, msgspec.MsgspecError) as error:
                    logger.error("%s/%s is passed over: %s", folder, name, error)
        return found

    # -- files ------------------------------------------------------------------------------------------------------

    def add_file(self, tenant: str, filename: str, content: bytes, now_s: float) -> dict[str, Any]:
        """Store an input file."""
        stored = sum(each.size for each in self.files.values() if each.tenant == tenant)
        if stored + len(content) > self.options.tenant_bytes:
            told = f"All files together may have {self.options.tenant_bytes} bytes; delete some."
            raise BatchError(413, told, "file", "storage_full")
        return self._keep(f"file-{secrets.token_hex(12)}", tenant, filename, INPUT, content, now_s).shown()

    def _keep(self, file_id: str, tenant: str, filename: str, purpose: str, content: bytes, now_s: float) -> StoredFile:
        told = StoredFile(file_id, tenant, filename, purpose, len(content), int(now_s))
        self._storage.write(f"files/{told.id}", content)
        self._storage.write(f"files/{told.id}.json", msgspec.json.encode(told))
        self.files[told.id] = told
        return told

    def file(self, tenant: str, file_id: str) -> StoredFile:
        """A file of this tenant; others do not exist for it."""
        found = self.files.get(file_id)
        if found is None or found.tenant != tenant:
            raise BatchError(404, f"No such file: {file_id[:64]!r}.", "file_id", "not_found")
        return found

    def content(self, tenant: str, file_id: str) -> bytes:
        """The bytes of a file."""
        return self._storage.read(f"files/{self.file(tenant, file_id).id}", MOST_BYTES)

    def list_files(self, tenant: str, purpose: str, limit: int, after: str) -> dict[str, Any]:
        """The newest first."""
        own = [each for each in self.files.values() if each.tenant == tenant and purpose in ("", each.purpose)]
        return _page(sorted(own, key=lambda each: (-each.created_s, each.id)), limit, after)

    def remove_file(self, tenant: str, file_id: str) -> dict[str, Any]:
        """Remove a file that no open batch reads."""
        found = self.file(tenant, file_id)
        users = [batch.id for batch in self._going() if batch.input_file_id == file_id]
        if users:
            raise BatchError(409, f"Batch {users[0]} reads this file; cancel it first.", "file_id", "file_in_use")
        self._drop(found)
        return {"id": file_id, "object": "file", "deleted": True}

    def _drop(self, found: StoredFile) -> None:
        self._storage.remove(f"files/{found.id}.json")
        self._storage.remove(f"files/{found.id}")
        del self.files[found.id]

    # -- batches ----------------------------------------------------------------------------------------------------

    def create(self, tenant: str, wanted: dict[str, Any], now_s: float) -> dict[str, Any]:
        """Open a batch; one whose file has a mistake has failed at once, and says where."""
        endpoint, metadata = wanted.get("endpoint"), wanted.get("metadata")
        if endpoint not in ENDPOINTS:
            raise BatchError(400, f"endpoint: must be one of {', '.join(ENDPOINTS)}.", "endpoint", "invalid_value")
        if wanted.get("completion_window") != WINDOW:
            raise BatchError(400, f"completion_window: must be {WINDOW!r}.", "completion_window", "invalid_value")
        _check_metadata(metadata)
        file_id = wanted.get("input_file_id")
        if not isinstance(file_id, str):
            raise BatchError(400, "input_file_id: must be the id of a file.", "input_file_id", "invalid_value")
        stored = self.file(tenant, file_id)
        content = self._storage.read(f"files/{stored.id}", MOST_BYTES)
        expires_s = int(now_s + WINDOW_S)
        batch = Batch(f"batch_{secrets.token_hex(12)}", tenant, str(endpoint), stored.id, int(now_s), expires_s)
        batch.metadata, batch.errors = metadata, check(content, str(endpoint), self.options)
        self.batches[batch.id] = batch
        if batch.errors:
            batch.state, batch.ended_s = "failed", int(now_s)
            self._storage.write(f"ended/{batch.id}.json", msgspec.json.encode(batch))
        else:
            batch.total = OpenBatch(batch, content).total
            self._storage.write(f"open/{batch.id}.json", msgspec.json.encode(batch))
        return batch.shown()

    def batch(self, tenant: str, batch_id: str) -> Batch:
        """A batch of this tenant; others do not exist for it."""
        found = self.batches.get(batch_id)
        if found is None or found.tenant != tenant:
            raise BatchError(404, f"No such batch: {batch_id[:64]!r}.", "batch_id", "not_found")
        return found

    def list_batches(self, tenant: str, limit: int, after: str) -> dict[str, Any]:
        """The newest first."""
        return _page([batch for batch in reversed(self.batches.values()) if batch.tenant == tenant], limit, after)

    def cancel(self, tenant: str, batch_id: str, now_s: float) -> dict[str, Any]:
        """End an open batch; what has been served of it can be had."""
        batch = self.batch(tenant, batch_id)
        if batch.state != "in_progress":
            told = f"Batch {batch.id} is {batch.state} and cannot be cancelled."
            raise BatchError(409, told, "batch_id", "batch_ended")
        self._end(self._opened(batch), "cancelled", now_s)
        return batch.shown()

    def counts(self) -> dict[str, int]:
        """Open batches, and requests of them that are not served yet."""
        going = self._going()
        left = sum(batch.total - batch.completed - batch.failed for batch in going)
        return {"open": len(going), "requests": left}

    # -- lines ------------------------------------------------------------------------------------------------------

    def give(self, worker: str, count: int, serving: Iterable[str], now_s: float) -> Given:
        """Up to ``count`` lines for an ingress that serves batches ``serving``: tenants in turns, their oldest batch
        first."""
        self._seen_s[worker] = now_s
        self.tick(now_s)
        first: dict[str, Batch] = {}
        for batch in self._going():
            if batch.tenant not in first and self._opened(batch).has_waiting:
                first[batch.tenant] = batch
        self._tenants = [t for t in self._tenants if t in first] + [t for t in first if t not in self._tenants]
        lines = list[Line]()
        while len(lines) < count and self._tenants:
            tenant = self._tenants.pop(0)
            opened = self._opened(first[tenant])
            lines.append(opened.take(worker))
            if opened.has_waiting:
                self._tenants.append(tenant)
        return Given(lines, [each for each in serving if not self._is_open(each)])

    def take_back(self, worker: str, results: Sequence[LineResult], now_s: float) -> None:
        """What an ingress has served; results of batches that have ended are too late."""
        self._seen_s[worker] = now_s
        for result in results:
            if self._is_open(result.batch_id):
                self._opened(self.batches[result.batch_id]).put(result)
        self.tick(now_s)

    def tick(self, now_s: float) -> None:
        """What time brings: ingresses that are gone, batches that end, results that are stored, old files that go."""
        for worker in [each for each, seen_s in self._seen_s.items() if now_s - seen_s > SILENT_S]:
            del self._seen_s[worker]
            for opened in self._open.values():
                opened.give_up(worker)
        for batch in self._going():
            known = self._open.get(batch.id)
            if known is not None and known.is_whole:
                self._end(known, "completed", now_s)
            elif now_s >= batch.expires_s:
                self._end(self._opened(batch), "expired", now_s)
            elif known is not None:
                known.store(self._storage, now_s)
        self._forget(now_s)

    def _going(self) -> list[Batch]:
        return [batch for batch in self.batches.values() if batch.state == "in_progress"]

    def _is_open(self, batch_id: str) -> bool:
        batch = self.batches.get(batch_id)
        return batch is not None and batch.state == "in_progress"

    def _opened(self, batch: Batch) -> OpenBatch:
        """An open batch with its lines, read from storage where they are not in memory."""
        if batch.id not in self._open:
            opened = OpenBatch(batch, self._storage.read(f"files/{batch.input_file_id}", MOST_BYTES))
            opened.restore(self._storage)
            self._open[batch.id] = opened
        return self._open[batch.id]

    def _end(self, opened: OpenBatch, state: State, now_s: float) -> None:
        batch = opened.batch
        good, bad = opened.files(self._storage, now_s, is_expired=state == "expired")
        for name, content, set_id in (
            ("output", good, lambda file_id: setattr(batch, "output_file_id", file_id)),
            ("error", bad, lambda file_id: setattr(batch, "error_file_id", file_id)),
        ):
            if content:
                file_id = f"file-{batch.id.removeprefix('batch_')}-{name}"  # the same if a keeper ends between the two
                self._keep(file_id, batch.tenant, f"{batch.id}_{name}.jsonl", OUTPUT, content, now_s)
                set_id(file_id)
        batch.state, batch.ended_s = state, int(now_s)
        self._storage.write(f"ended/{batch.id}.json", msgspec.json.encode(batch))
        self._storage.remove(f"open/{batch.id}.json")
        self._storage.remove_folder(f"results/{batch.id}")
        del self._open[batch.id]

    def _forget(self, now_s: float) -> None:
        """Remove what is older than files are kept, but for what an open batch reads."""
        oldest_s, used = now_s - self.options.keep_s, {batch.input_file_id for batch in self._going()}
        for stored in [each for each in self.files.values() if each.created_s < oldest_s and each.id not in used]:
            self._drop(stored)
        for batch in [each for each in self.batches.values() if each.ended_s and each.ended_s < oldest_s]:
            self._storage.remove(f"ended/{batch.id}.json")
            del self.batches[batch.id]


def _page(items: Sequence[Any], limit: int, after: str) -> dict[str, Any]:
    """A part of a list as OpenAI pages it."""
    if not 1 <= limit <= MOST_LISTED:
        raise BatchError(400, f"limit: must be from 1 to {MOST_LISTED}.", "limit", "invalid_value")
    ids = [item.id for item in items]
    begin = ids.index(after) + 1 if after in ids else 0
    shown = [item.shown() for item in items[begin : begin + limit]]
    ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {"first_id": None, "last_id": None}
    return {"object": "list", "data": shown, **ends, "has_more": begin + limit < len(items)}


def _check_metadata(metadata: Any) -> None:
    sound: Callable[[Any, int], bool] = lambda text, most: isinstance(text, str) and len(text) <= most  # noqa: E731
    if metadata is None:
        return
    if not isinstance(metadata, dict) or len(metadata) > MOST_METADATA:
        raise BatchError(400, f"metadata: must be an object of {MOST_METADATA} pairs at most.", "metadata")
    if not all(sound(key, LONGEST_KEY) and sound(value, LONGEST_VALUE) for key, value in metadata.items()):
        told = f"metadata: keys are strings of {LONGEST_KEY} characters at most, values of {LONGEST_VALUE}."
        raise BatchError(400, told, "metadata", "invalid_value")
