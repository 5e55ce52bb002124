"""The HTTP port of a server on this machine: free, or who has it."""

import contextlib
import errno
import socket
from collections.abc import Iterator
from typing import Any

import psutil

from serving.launch.local_ray import LaunchError
from serving.launch.running import running

EVERYWHERE = ("0.0.0.0", "::")


def check_port_free(document: dict[str, Any], advice: str = "") -> None:
    """Say at once that the HTTP port is taken, and by whom, which Serve would tell in a log file.

    Raises:
        LaunchError: with ``advice`` at its end.
    """
    options = document.get("http_options") or {}
    host, port = str(options.get("host", "127.0.0.1")), int(options.get("port", 8000))
    if not 0 < port < 1 << 16:
        raise LaunchError(f"http_options.port: must be from 1 to 65535, got {port}")
    try:
        family, *_, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
    except OSError as error:
        who = listener(port, str(place[0])) if error.errno == errno.EADDRINUSE else ""
        advice = advice if error.errno in (errno.EADDRINUSE, errno.EACCES) else ""  # another port helps
        told = f"{error.strerror}{f', by {who}' if who else ''}{advice}"
        raise LaunchError(f"http_options.port: {host}:{port} cannot be used: {told}") from None


def listener(port: int, host: str) -> str:
    """Which process listens on a port of this address or of all; empty where nobody tells, as of another user's.

    A server of this project is named by the process that its user started, not by the proxy within.
    """
    servers = {each.pid for each in running()}
    for pid in _listening(port, host):
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            own = next((each for each in (process, *process.parents()) if each.pid in servers), process)
            return f"{'a server of polyslo, ' if own.pid in servers else ''}process {own.pid} ({own.name()})"
    return ""


def _listening(port: int, host: str) -> Iterator[int]:
    with contextlib.suppress(psutil.Error, OSError):
        for each in psutil.net_connections("tcp"):
            is_there = each.status == psutil.CONN_LISTEN and each.laddr.port == port
            if is_there and each.pid and (host in EVERYWHERE or each.laddr.ip in (host, *EVERYWHERE)):
                yield each.pid
