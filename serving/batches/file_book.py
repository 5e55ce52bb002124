"""The files of an application, as they are stored: whose they are, and how many each tenant may have."""

import logging
import secrets
from collections.abc import Collection, Iterable, Iterator
from typing import Any, TypeVar

import msgspec

from controller.storage import Storage, folder_of
from serving.batches.objects import BatchError, StoredFile
from serving.batches.open_batch import MOST_BYTES
from serving.batches.wanted import Page, page_of
from serving.config.batches import BatchOptions

logger = logging.getLogger("polyslo.batches")

MOST_FILES = 10_000  # of a tenant
INPUT, OUTPUT = "batch", "batch_output"
LOST = "file_lost"  # code of an error: the file is known, and its content is not in storage any more

Kind = TypeVar("Kind", bound=msgspec.Struct)


class FileBook:
    """One at a time may use a storage: on a file system another one is an ``OSError``."""

    def __init__(self, options: BatchOptions, application: str) -> None:
        self.options = options
        self._storage = Storage(options.storage, folder_of(application), "batches")
        self._storage.claim()
        self.files = {each.id: each for each in self._load("files", StoredFile)}

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

    def add_file(
        self, tenant: str, filename: str, content: bytes, expires_after_s: int = 0, *, now_s: float
    ) -> dict[str, Any]:
        """Store an input file; ``expires_after_s`` as of ``expires_s``."""
        stored = self.stored_bytes(tenant)
        files = sum(each.tenant == tenant for each in self.files.values())
        if stored + len(content) > self.options.tenant_bytes or files >= MOST_FILES:
            told = f"There may be {MOST_FILES} files of {self.options.tenant_bytes} bytes in all; delete some."
            raise BatchError(413, told, "file", "storage_full")
        file = StoredFile(f"file-{secrets.token_hex(12)}", tenant, filename, INPUT, len(content), int(now_s))
        file.expires_s = self.expires_s(expires_after_s, now_s)
        return self._keep(file, (content,)).shown()

    def expires_s(self, after_s: int, now_s: float) -> int:
        """When a new file expires for which a client wants that after so many seconds; 0: it wants nothing special."""
        return int(now_s) + min(after_s, self.options.keep_s) if after_s else 0

    def stored_bytes(self, tenant: str) -> int:
        """Of all files of this tenant, those with results included."""
        return sum(each.size for each in self.files.values() if each.tenant == tenant)

    def _keep(self, told: StoredFile, pieces: Iterable[bytes]) -> StoredFile:
        told.size = self._storage.write_pieces(f"files/{told.id}", pieces)
        self._storage.write(f"files/{told.id}.json", msgspec.json.encode(told))
        self.files[told.id] = told
        return told

    def file(self, tenant: str, file_id: str, param: str = "file_id") -> StoredFile:
        """A file of this tenant, which ``param`` of a request names; others do not exist for it."""
        found = self.files.get(file_id)
        if found is None or found.tenant != tenant:
            raise BatchError(404, f"No such file: {file_id[:64]!r}.", param, "not_found")
        return found

    def content(self, tenant: str, file_id: str, begin: int = 0, size: int = MOST_BYTES) -> bytes:
        """A part of the bytes of a file."""
        found = self.file(tenant, file_id)
        try:
            return self._storage.read_part(f"files/{found.id}", begin, size)
        except FileNotFoundError:
            raise BatchError(404, "The content of this file is missing.", "file_id", LOST) from None

    def _input(self, tenant: str, file_id: str) -> Iterator[bytes]:
        """The lines of the file that a new batch names."""
        found = self.file(tenant, file_id, "input_file_id")
        try:
            yield from self._storage.lines(f"files/{found.id}")
        except FileNotFoundError:
            raise BatchError(404, "The input file is missing; upload it again.", "input_file_id", LOST) from None

    def list_files(self, tenant: str, purpose: str, page: Page) -> dict[str, Any]:
        """Files of this purpose, or of any (empty)."""
        own = [each for each in self.files.values() if each.tenant == tenant and purpose in ("", each.purpose)]
        return page_of(sorted(own, key=lambda each: (each.created_s, each.id)), page)

    def _drop(self, found: StoredFile) -> None:
        self._storage.remove(f"files/{found.id}.json")
        self._storage.remove(f"files/{found.id}")
        del self.files[found.id]

    def _drop_old(self, used: Collection[str], now_s: float) -> None:
        """Remove files that have expired or are older than files are kept, but for those that are ``used``."""
        oldest_s = now_s - self.options.keep_s
        for found in [each for each in self.files.values() if each.id not in used]:
            if found.created_s < oldest_s or 0 < found.expires_s <= now_s:
                self._drop(found)
