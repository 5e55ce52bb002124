"""What replicas and ingresses log, shown while they run: Ray keeps it in files of its session, one for each process."""

import contextlib
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

EVERY_S = 0.5
OURS = re.compile(r"^\[(?:Ingress|(?:[a-z0-9_.-]+/)?[a-z0-9]{8})\] ")  # the prefix of a replica's or an ingress's lines


class LogFollower:
    """Reads complete new lines of all processes below a folder of Ray's, and passes on those that are ours."""

    def __init__(self, folder: Path, show: Callable[[str], None]) -> None:
        self._folder, self._show = folder, show
        self._read: dict[Path, int] = {}  # bytes of each file that were shown

    def follow(self) -> None:
        """Show what is new; a file that is gone or not readable is passed over."""
        for path in sorted(self._folder.glob("session_*/logs/worker-*")):
            if path.parents[1].is_symlink() or path.suffix not in (".out", ".err"):
                continue
            with contextlib.suppress(OSError), path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                complete, newline, _ = file.read().rpartition(b"\n")
                self._read[path] = self._read.get(path, 0) + len(complete) + len(newline)
                for line in complete.decode(errors="replace").splitlines():
                    if OURS.match(line):
                        self._show(line)


@contextlib.contextmanager
def logs_shown(folder: Path) -> Iterator[None]:
    """Lines of ours go to stderr for the duration, those of the end included."""
    follower, done = LogFollower(folder, lambda line: print(line, file=sys.stderr, flush=True)), threading.Event()

    def run() -> None:
        while not done.wait(EVERY_S):
            follower.follow()

    thread = threading.Thread(target=run, name="log-follower", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        follower.follow()
