"""Which CPU cores an engine may have to itself: claimed by file locks, which the kernel drops with their holder."""

import fcntl
import os
import tempfile
from pathlib import Path


class CoreClaim:
    """Cores of this machine that no other claim holds. ``cores`` is empty when there are too few left."""

    def __init__(self, count: int, folder: Path | None = None, available: set[int] | None = None) -> None:
        self._folder = folder or Path(tempfile.gettempdir()) / f"polyslo-cores-{os.getuid()}"
        self._folder.mkdir(exist_ok=True)
        self._held: dict[int, int] = {}  # core -> file descriptor
        for core in sorted(os.sched_getaffinity(0) if available is None else available):
            if len(self._held) < count:
                self._try(core)
        if len(self._held) < count:
            self.release()

    @property
    def cores(self) -> tuple[int, ...]:
        """The cores held."""
        return tuple(self._held)

    def _try(self, core: int) -> None:
        descriptor = os.open(self._folder / f"core-{core}", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
        else:
            self._held[core] = descriptor

    def release(self) -> None:
        """Give the cores back."""
        for descriptor in self._held.values():
            os.close(descriptor)
        self._held.clear()
