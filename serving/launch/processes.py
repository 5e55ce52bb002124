"""An end for processes that we have started, also where we are killed before we could end them. Knows no Ray.

Run as a program it is the process that waits for ours: a session of its own, which no Ctrl-C of a terminal reaches.
"""

import contextlib
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator

import psutil

ORPHANS_S = 2.0  # that processes have to end by themselves once we are gone, as those of Ray do


def end_processes(processes: set[psutil.Process], patience_s: float = 8.0) -> None:
    """End what is left of processes that we started, and of their children."""
    for process in list(processes):
        with contextlib.suppress(psutil.Error):
            processes |= set(process.children(recursive=True))
    _, alive = psutil.wait_procs(list(processes), timeout=patience_s)
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(alive, timeout=patience_s)


@contextlib.contextmanager
def ended_without_us(processes: Collection[psutil.Process]) -> Iterator[None]:
    """``processes`` are ended also where a signal that nobody can catch ends this one meanwhile."""
    told = "".join(f"{each.pid} {each.create_time()!r}\n" for each in processes if each.is_running())
    command = [sys.executable, "-P", __file__]
    try:
        waiting = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, text=True)
    except OSError:  # a machine that is full must not keep us from ending them ourselves
        yield
        return
    assert waiting.stdin is not None
    try:
        with contextlib.suppress(BrokenPipeError):
            waiting.stdin.write(f"{told}\n")
            waiting.stdin.flush()  # and stays open until we end
        yield
    finally:
        waiting.kill()
        waiting.wait()
        with contextlib.suppress(BrokenPipeError):
            waiting.stdin.close()


def end_orphans() -> None:
    """Read which processes, wait for the end of who wrote that, and end them."""
    for ends in (signal.SIGINT, signal.SIGTERM):  # as service managers send it to all
        signal.signal(ends, signal.SIG_IGN)
    orphans = set[psutil.Process]()
    for line in iter(sys.stdin.readline, ""):
        if not line.endswith("\n") or not line.strip():
            break
        pid, created_s = line.split()
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(int(pid))
            if process.create_time() == float(created_s):
                orphans.add(process)
    sys.stdin.read()
    end_processes(orphans, ORPHANS_S)


if __name__ == "__main__":
    end_orphans()
