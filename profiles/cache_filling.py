"""One process fills the cache of compiled kernels; others that start meanwhile wait for it, and compile nothing twice.

A lock on a file of the cache's folder. It ends with its process, however that ends.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import numba

import profiles.jit  # noqa: F401  (tells numba where the cache is)

LOCK = "filling.lock"
_filling = False


@contextlib.contextmanager
def filling() -> Iterator[None]:
    """Let others wait in ``await_filled`` until the block ends."""
    global _filling
    with _locked(fcntl.LOCK_EX):
        _filling = True
        try:
            yield
        finally:
            _filling = False


def await_filled() -> None:
    """Return when no other process fills the cache; at once where files cannot be locked."""
    if not _filling:
        with _locked(fcntl.LOCK_SH):
            pass


@contextlib.contextmanager
def _locked(how: int) -> Iterator[None]:
    """The block runs without the lock where the folder cannot be written or the file system has no locks."""
    descriptor = -1
    try:
        with contextlib.suppress(OSError):
            folder = Path(numba.config.CACHE_DIR)
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            fcntl.flock(descriptor, how)
        yield
    finally:
        if descriptor >= 0:
            os.close(descriptor)
