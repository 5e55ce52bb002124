"""What keeps two fleets on one machine apart, and ends with its process."""

import contextlib
import inspect
import os
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from rich.console import Console

pytest.importorskip("ray")

from ray.serve._private import constants

from serving.cli.demo import take_port
from serving.launch.http_port import check_port_free, listener
from serving.launch.launch import server_of
from serving.launch.local_ray import LaunchError, block_of_ports, free_port, proxy_settings, terminable
from serving.launch.running import announced


def pages_of(settings: dict[str, str]) -> list[int]:
    proxies = ("HAPROXY_STATS", "HAPROXY_METRICS", "FALLBACK_PROXY_HTTP", "FALLBACK_PROXY_GRPC")
    return [int(settings[f"RAY_SERVE_{proxy}_PORT"]) for proxy in proxies]


def test_every_port_that_serve_fixes_is_set(tmp_path: Path) -> None:
    """A port that Ray gives to every fleet alike is shared by two of them, and so are their requests."""
    fixed = {f"RAY_SERVE_{name}" for name in re.findall(r'"RAY_SERVE_(\w+_PORT)", "?\d', inspect.getsource(constants))}
    of_grpc = {"RAY_SERVE_DIRECT_INGRESS_MIN_GRPC_PORT", "RAY_SERVE_DIRECT_INGRESS_MAX_GRPC_PORT"}  # no gRPC service
    assert "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT" in fixed
    assert fixed - of_grpc <= proxy_settings(tmp_path, 30001).keys()


def ports_of(settings: dict[str, str]) -> list[int]:
    low, high = (int(settings[f"RAY_SERVE_DIRECT_INGRESS_{end}_HTTP_PORT"]) for end in ("MIN", "MAX"))
    return [*pages_of(settings), *range(low, high + 1)]


def test_two_fleets_share_no_port_and_no_path(tmp_path: Path) -> None:
    with block_of_ports() as first, block_of_ports() as second:
        (tmp_path / "a").mkdir()
        (tmp_path / "b").mkdir()
        a, b = proxy_settings(tmp_path / "a", first), proxy_settings(tmp_path / "b", second)
        ports = ports_of(a) + ports_of(b)
        assert len(ports) == len(set(ports))
        assert len(ports_of(a)) > 90
        assert all(a[name] != b[name] for name in a)
    with block_of_ports() as again:
        assert again == first


def test_the_proxys_pages_have_ports_that_no_connection_gets(tmp_path: Path) -> None:
    """A second fleet did not start: HAProxy binds a minute after its ports were found to be free."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    with block_of_ports() as first:
        assert max(*ports_of(proxy_settings(tmp_path, first)), free_port()) < lowest
    with socket.socket() as other:
        other.bind(("127.0.0.1", pages_of(proxy_settings(tmp_path, first))[0]))
        with block_of_ports() as next_one:
            assert next_one > first


def test_the_proxys_program_is_ours(tmp_path: Path) -> None:
    program = Path(proxy_settings(tmp_path, 30001)["RAY_SERVE_HAPROXY_BINARY_PATH"])
    assert os.access(program, os.X_OK)
    assert "serving/launch/haproxy.py" in program.read_text()


def test_a_termination_unwinds() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit), terminable():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_second_termination_does_not_stop_what_the_first_one_began() -> None:
    unwound = []

    def clean_up() -> None:
        signal.raise_signal(signal.SIGTERM)
        unwound.append(True)

    @contextlib.contextmanager
    def cleaned() -> Iterator[None]:
        try:
            yield
        finally:
            clean_up()

    with pytest.raises(SystemExit), terminable(), cleaned():
        signal.raise_signal(signal.SIGTERM)
    assert unwound == [True]
    with pytest.raises(SystemExit), terminable():
        signal.raise_signal(signal.SIGTERM)


def test_the_demo_takes_another_port_and_a_server_says_that_its_is_taken() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", free_port()))
        other.listen()
        taken = other.getsockname()[1]
        document = {"http_options": {"host": "127.0.0.1", "port": taken}}
        own = f"process {os.getpid()} ({psutil.Process().name()})"
        told = f"127.0.0.1:{taken} cannot be used: Address already in use, by {own}"
        with pytest.raises(LaunchError, match=re.escape(told)):
            check_port_free(document)
        take_port(document, Console(quiet=True))
    assert document["http_options"]["port"] != taken
    check_port_free(document)


def test_a_server_of_this_project_is_named_as_such(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with socket.socket() as other:
        other.bind(("127.0.0.1", free_port()))
        port = other.getsockname()[1]
        assert listener(port, "127.0.0.1") == ""
        other.listen()
        with announced(f"http://127.0.0.1:{port}", ""):
            assert listener(port, "127.0.0.2") == ""
            assert listener(port, "127.0.0.1").startswith(f"a server of polyslo, process {os.getpid()} (")


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("::", "http://[::1]:8123"),
        ("::1", "http://[::1]:8123"),
        ("0.0.0.0", "http://127.0.0.1:8123"),
        ("localhost", "http://localhost:8123"),
    ],
)
def test_the_address_of_a_server_is_one_that_a_client_can_use(host: str, address: str) -> None:
    assert server_of({"http_options": {"host": host, "port": 8123}}) == address


@pytest.mark.parametrize("host", ["::1", "localhost"])
def test_a_port_is_looked_at_where_the_host_listens(host: str) -> None:
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    if family == socket.AF_INET6 and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    with socket.socket(family) as other:
        other.bind((host, 0))
        other.listen()
        taken = other.getsockname()[1]
        with pytest.raises(LaunchError, match=f"{host}:{taken} cannot be used"):
            check_port_free({"http_options": {"host": host, "port": taken}})
    check_port_free({"http_options": {"host": host, "port": taken}})


@pytest.mark.parametrize(("host", "there"), [("0.0.0.0", "http://10.0.0.5:8123"), ("10.1.1.1", "http://10.1.1.1:8123")])
def test_a_server_on_all_interfaces_is_where_the_clusters_dashboard_is(host: str, there: str) -> None:
    assert server_of({"http_options": {"host": host, "port": 8123}}, "http://10.0.0.5:8265") == there
