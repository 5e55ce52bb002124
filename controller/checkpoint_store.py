"""Checkpoints as parquet files under a storage URI: written whole or not at all, read table by table. Touches files.

``URI/APPLICATION/NUMBER/TABLE.parquet``, and last ``NUMBER/complete.parquet``, which names all tables of a checkpoint
with their digests. One without it was cut off. A table that is damaged, of another format, or that the storage never
gives, is told of, and the next older checkpoint that has a sound one stands in. Nothing is unpickled.
"""

import contextlib
import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from controller.checkpoint import FORMAT
from controller.lengths.snapshot import Table
from controller.storage import Storage, folder_of, without_secrets

KEPT = 3  # whole checkpoints; older ones are removed, and those that were cut off
MOST_ASKED = 60  # times for files that the storage lists and does not give; five minutes of a keeper
COMPLETE = "complete"
MOST_BYTES = 1 << 28  # of one file
_FORMAT, _SAVED = b"polyslo_format", b"polyslo_saved_s"
_NAME = re.compile(r"[a-z_]{1,40}")


class Found(NamedTuple):
    """Tables of the latest checkpoint, older ones standing in; when it was saved (seconds since 1970), and problems."""

    number: int
    saved_s: float
    tables: dict[str, Table]
    problems: list[str]


class Complete(NamedTuple):
    """What a whole checkpoint holds: its files by table, with their digests."""

    number: int
    saved_s: float
    digests: dict[str, str]


@dataclass
class CheckpointStore:
    """The checkpoints of an application or of one of its models.

    Every method blocks, and raises ``OSError`` where the storage fails.
    """

    uri: str
    application: str
    model: str = ""  # among several, which have a folder each
    not_removed: OSError | None = None  # why older checkpoints than the latest few are still there
    _next: int = field(default=0)
    _asked: int = field(default=0)
    _not_given: OSError | None = field(default=None)  # what failed first while files were read that are needed
    _is_complete: bool = field(default=False)  # a checkpoint's tables are all there: no older one is needed

    def __post_init__(self) -> None:
        of_model = [f"model-{self.model}"] if self.model else []
        self._files = Storage(self.uri, folder_of(self.application), *of_model)

    def save(self, tables: Mapping[str, Table], saved_s: float) -> int:
        """Write a checkpoint and remove those beyond the latest few, or note why not; returns its number."""
        number = max([self._next, *(found + 1 for found in self._numbers())])
        self._next = number + 1
        try:
            self._write_all(number, tables, saved_s)
        except BaseException:
            with contextlib.suppress(OSError):  # a storage that is full has no room for what every attempt leaves
                self._files.remove_folder(self._folder(number))
            raise
        self.not_removed = self._remove_before(number)
        return number

    def _write_all(self, number: int, tables: Mapping[str, Table], saved_s: float) -> None:
        folder, digests = self._folder(number), {}
        for name, content in packed(tables, saved_s).items():
            digests[name] = self._write(f"{folder}/{name}.parquet", content)
        names = {"table": np.array(list(digests), dtype="O"), "digest": np.array(list(digests.values()), dtype="O")}
        self._write(f"{folder}/{COMPLETE}.parquet", to_parquet(names, saved_s))

    def _remove_before(self, number: int) -> OSError | None:
        """Checkpoints before this one, except the latest few that are whole; returns what failed with the oldest."""
        whole, failed = 0, None
        for each in self._numbers():
            try:
                is_whole = f"{COMPLETE}.parquet" in self._files.names(self._folder(each))
                whole += is_whole
                if each < number and not (is_whole and whole <= KEPT):
                    self._files.remove_folder(self._folder(each))
            except OSError as error:
                failed = error
        return failed

    def load(self) -> Found | None:
        """The newest sound table of every name; none where there is no whole checkpoint. What the storage does not give
        now is no damage: it raises, so that it is asked again before newer checkpoints replace what it has. What it
        has not given ``MOST_ASKED`` times, while it gave other tables, is a problem like damage."""
        self._not_given, self._is_complete = None, False
        found = self._found()
        gives_some = found is not None and bool(found.tables)
        if self._not_given is not None and not (gives_some and self._asked >= MOST_ASKED):
            self._asked += gives_some
            raise self._not_given
        return found

    def _found(self) -> Found | None:
        found, problems = None, list[str]()
        for complete in self._complete(problems):
            found = found or Found(complete.number, complete.saved_s, {}, problems)
            for name, digest in complete.digests.items():
                if name not in found.tables and (table := self._table(complete.number, name, digest, problems)):
                    found.tables[name] = table
            self._is_complete |= complete.digests.keys() <= found.tables.keys()
        if found is None and problems:
            return Found(0, 0.0, {}, problems)
        return found

    def _complete(self, problems: list[str]) -> Iterator[Complete]:
        for number in self._numbers():
            try:
                table, saved_s = from_parquet(self._read(f"{self._folder(number)}/{COMPLETE}.parquet"))
                digests = dict(zip(map(str, table["table"]), map(str, table["digest"]), strict=True))
                if not all(_NAME.fullmatch(name) for name in digests):
                    raise ValueError("a table has no name")
                yield Complete(number, saved_s, digests)
            except (ValueError, KeyError, OSError, pa.ArrowException) as error:
                self._note(f"checkpoint {number}", error, problems)

    def _table(self, number: int, name: str, digest: str, problems: list[str]) -> Table | None:
        try:
            content = self._read(f"{self._folder(number)}/{name}.parquet")
            if digest_of(content) != digest:
                raise ValueError("is damaged")
            return from_parquet(content)[0]
        except (ValueError, KeyError, OSError, pa.ArrowException) as error:
            self._note(f"checkpoint {number}, {name}", error, problems)
            return None

    def _note(self, what: str, error: Exception, problems: list[str]) -> None:
        problems.append(f"{what}: {without_secrets(_line(error), self.uri)}")
        if isinstance(error, OSError) and not self._is_complete:
            self._not_given = self._not_given or error

    def _numbers(self) -> list[int]:
        """Of all checkpoints, whole or not, the newest first."""
        return sorted((int(name) for name in self._files.folders() if re.fullmatch(r"\d{1,12}", name)), reverse=True)

    @staticmethod
    def _folder(number: int) -> str:
        return f"{number:010d}"

    def _read(self, path: str) -> bytes:
        return self._files.read(path, MOST_BYTES)

    def _write(self, path: str, content: bytes) -> str:
        self._files.write(path, content)
        return digest_of(content)


def packed(tables: Mapping[str, Table], saved_s: float) -> dict[str, bytes]:
    """Each table as a parquet file."""
    return {name: to_parquet(table, saved_s) for name, table in tables.items()}


def unpacked(files: Mapping[str, bytes]) -> Found:
    """The tables of ``packed``; those that cannot be read are problems."""
    found = Found(0, math.nan, {}, [])
    for name, content in files.items():
        try:
            table, saved_s = from_parquet(content)
        except (ValueError, KeyError, pa.ArrowException) as error:
            found.problems.append(f"{name}: {_line(error)}")
            continue
        found.tables[name], found = table, found._replace(saved_s=saved_s)
    return found


def digest_of(content: bytes) -> str:
    """By which damage is known."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def to_parquet(table: Table, saved_s: float) -> bytes:
    """Columns as a parquet file that knows its format and its time."""
    columns = {name: pa.array(values.tolist() if values.dtype == object else values) for name, values in table.items()}
    stored = pa.table(columns).replace_schema_metadata({_FORMAT: str(FORMAT), _SAVED: repr(saved_s)})
    sink = pa.BufferOutputStream()
    pq.write_table(stored, sink)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def from_parquet(content: bytes) -> tuple[Table, float]:
    """Columns of numbers and strings, and when they were saved; raises ``ValueError`` for anything else."""
    try:
        stored = pq.read_table(pa.BufferReader(content))
    except OSError as error:  # no storage has failed: bytes in memory are damaged
        raise ValueError(_line(error)) from None
    told = stored.schema.metadata or {}
    if told.get(_FORMAT) != str(FORMAT).encode():
        raise ValueError(f"is of format {told.get(_FORMAT, b'none').decode(errors='replace')[:20]}, not {FORMAT}")
    table: Table = {}
    for name in stored.column_names:
        column = stored[name]
        is_text = pa.types.is_string(column.type) or pa.types.is_large_string(column.type)
        is_number = pa.types.is_integer(column.type) or pa.types.is_floating(column.type)
        if column.null_count or not (is_text or is_number or pa.types.is_boolean(column.type)):
            raise ValueError(f"column {name}: holds {column.type}, or gaps")
        table[name] = np.array(column.to_pylist(), dtype="O") if is_text else column.to_numpy()
    saved_s = float(told[_SAVED])
    if not table or not np.isfinite(saved_s):
        raise ValueError("has no columns, or no time")
    return table, saved_s


def _line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
