"""Files under a storage URI, written whole or not at all. All methods block; they raise ``OSError`` where it fails."""

import contextlib
import fcntl
import io
import os
import re
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from pyarrow import fs

BUFFER = 1 << 20  # bytes that are read or written at a time
_USER = re.compile(r"//[^/@]*@")


class Storage:
    """A folder of a local file system, or of an object store that ``pyarrow.fs`` knows."""

    def __init__(self, uri: str, *folders: str) -> None:
        if uri.startswith("/"):
            self._files, root = fs.LocalFileSystem(), uri
        else:
            self._files, root = fs.FileSystem.from_uri(uri)
        self._root = "/".join((root.rstrip("/"), *folders))
        self._claim: Any = None

    def claim(self) -> None:
        """Keep others of this machine out of the folder until ``release``, or the end of this process. Object stores
        have no such claim.

        Raises:
            BlockingIOError: somebody else has it.
        """
        if self._files.type_name == "local":
            self._files.create_dir(self._root, recursive=True)
            descriptor = os.open(f"{self._root}/.claimed", os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
            self._claim = weakref.finalize(self, os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def release(self) -> None:
        """Let others in."""
        if self._claim is not None:
            self._claim()

    def folders(self) -> list[str]:
        """Names of the folders."""
        return self._names("", fs.FileType.Directory)

    def names(self, folder: str) -> list[str]:
        """Names of the files in a folder, which need not exist."""
        return self._names(folder, fs.FileType.File)

    def _names(self, folder: str, kind: fs.FileType) -> list[str]:
        where = f"{self._root}/{folder}".rstrip("/")
        listed = self._files.get_file_info(fs.FileSelector(where, allow_not_found=True))
        return [info.base_name for info in listed if info.type == kind]

    def read(self, path: str, most_bytes: int) -> bytes:
        """A whole file; raises ``ValueError`` where there is none, or a longer one."""
        info = self._files.get_file_info(f"{self._root}/{path}")
        if info.type != fs.FileType.File:
            raise ValueError("is missing")
        if info.size > most_bytes:
            raise ValueError(f"has {info.size} bytes, more than any of ours")
        with self._files.open_input_stream(f"{self._root}/{path}") as stream:
            content: bytes = stream.read()
        return content

    def read_part(self, path: str, begin: int, size: int) -> bytes:
        """Up to ``size`` bytes of a file from ``begin`` on."""
        with self._files.open_input_file(f"{self._root}/{path}") as stream:
            stream.seek(begin)
            content: bytes = stream.read(size)
        return content

    def lines(self, path: str) -> Iterator[bytes]:
        """The lines of a file, one after the other, without their ends; raises ``OSError`` where there is none."""
        with io.BufferedReader(self._files.open_input_file(f"{self._root}/{path}"), BUFFER) as stream:
            for line in stream:
                yield line.rstrip(b"\n")

    def write(self, path: str, content: bytes) -> None:
        """``write_pieces`` of one."""
        self.write_pieces(path, (content,))

    def write_pieces(self, path: str, pieces: Iterable[bytes]) -> int:
        """Write a file, and tell its size; on a file system a reader sees all of it or none. So it does in an object
        store, unless ``pieces`` raises."""
        path = f"{self._root}/{path}"
        self._files.create_dir(path.rpartition("/")[0], recursive=True)
        is_local = self._files.type_name in ("local", "hdfs")
        written, size = f"{path}.partial" if is_local else path, 0
        try:
            with self._files.open_output_stream(written, buffer_size=BUFFER) as stream:
                for piece in pieces:
                    stream.write(piece)
                    size += len(piece)
            if is_local:
                self._files.move(written, path)
            return size
        except BaseException:
            if is_local:  # what was written takes room that others may need
                with contextlib.suppress(OSError):
                    self._files.delete_file(written)
            raise

    def remove(self, path: str) -> None:
        """Remove a file, if there is one."""
        if self._files.get_file_info(f"{self._root}/{path}").type == fs.FileType.File:
            self._files.delete_file(f"{self._root}/{path}")

    def remove_folder(self, folder: str) -> None:
        """Remove a folder with everything in it, if there is one."""
        if self._files.get_file_info(f"{self._root}/{folder}").type == fs.FileType.Directory:
            self._files.delete_dir(f"{self._root}/{folder}")


def folder_of(application: str) -> str:
    """The folder of an application, whatever characters its name has."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", application).lstrip(".") or "default"


def shown_uri(uri: str) -> str:
    """A URI without what it may hold of credentials."""
    return _USER.sub("//", uri).partition("?")[0]


def without_secrets(text: str, uri: str) -> str:
    """A message of the storage in which the URI, wherever it is quoted, has no credentials."""
    return _USER.sub("//", text.replace(uri, shown_uri(uri)))
