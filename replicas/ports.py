"""Ports of this machine that an engine will listen on later: claimed by file locks, which the kernel drops with their
holder. A port that is merely free now may be taken by the next engine before this one has loaded its model."""

import fcntl
import os
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path

PORTS = range(12000, 18000)  # below those that Linux gives to connections, and those of local Rays


class PortClaim:
    """``count`` ports in a row that nothing listens on and no other claim holds.

    Raises:
        OSError: there are none.
    """

    def __init__(self, count: int, folder: Path | None = None, among: Sequence[int] = PORTS) -> None:
        self._folder = folder or Path(tempfile.gettempdir()) / f"polyslo-ports-{os.getuid()}"
        self._folder.mkdir(exist_ok=True)
        self._held: dict[int, int] = {}  # port -> file descriptor
        for port in among:
            if len(self._held) == count:
                break
            if not self._try(port):
                self.release()
        if len(self._held) < count:
            self.release()
            raise OSError(f"no {count} free ports in a row from {among[0]} to {among[-1]}")

    @property
    def first(self) -> int:
        """The first of the ports."""
        return min(self._held)

    def _try(self, port: int) -> bool:
        descriptor = os.open(self._folder / f"port-{port}", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with socket.socket() as probe:
                probe.bind(("", port))
        except OSError:
            os.close(descriptor)
            return False
        self._held[port] = descriptor
        return True

    def release(self) -> None:
        """Give the ports back."""
        for descriptor in self._held.values():
            os.close(descriptor)
        self._held.clear()
