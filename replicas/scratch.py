"""Folders of an engine under the temporary directory. A killed replica cannot remove its own; the next one does."""

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

PREFIX, LOCK = "polyslo-engine-", "lock"
UNLOCKED_S = 600.0  # a folder without a lock is not being made any more


class ScratchFolder:
    """A folder that is this process's as long as it lives: a lock says so, which ends with the process."""

    def __init__(self, parent: str | None = None) -> None:
        """``parent``: where it is made; the temporary directory by default. Folders of the dead there are removed."""
        where = Path(parent or tempfile.gettempdir())
        remove_abandoned(where)
        self.path = tempfile.mkdtemp(prefix=PREFIX, dir=where)
        self._lock = os.open(os.path.join(self.path, LOCK), os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def remove(self) -> None:
        """Remove it with what it holds; more than once does no harm."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def remove_abandoned(where: Path) -> None:
    """Remove the folders of processes that have ended; what belongs to other users stays."""
    for folder in where.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if _is_abandoned(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _is_abandoned(folder: Path) -> bool:
    try:
        lock = os.open(folder / LOCK, os.O_RDWR)
    except FileNotFoundError:
        return time.time() - folder.stat().st_mtime > UNLOCKED_S
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True
