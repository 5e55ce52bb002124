"""A Ray of our own on this machine, beside any other: its environment, its ports, and an end that leaves nothing."""

import contextlib
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import ray
from rich.console import Console

from replicas.scratch import remove_abandoned
from serving.launch.haproxy import SETTING, write_launcher
from serving.launch.log_follower import logs_shown
from serving.launch.processes import end_processes, ended_without_us
from serving.launch.steps import steps_shown

DASHBOARD_PORT = 8265
PORTS = range(30000, 32700, 100)  # first ports of blocks, below those that Linux gives to connections
FREE_PORTS = range(20000, PORTS.start)
SINGLE_PORTS = (  # one port each: HAProxy's pages, and the proxy in Python that it falls back on
    "RAY_SERVE_HAPROXY_STATS_PORT",
    "RAY_SERVE_HAPROXY_METRICS_PORT",
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT",
    "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT",
)
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",  # Ray's 15 starves engines on a CPU behind everything else on the machine
    "PYTHONWARNINGS": "ignore",
}

# For the cluster, never for a driver: tokens go from the ingress straight to HAProxy, calls by gRPC.
CLUSTER_ONLY = {"RAY_SERVE_THROUGHPUT_OPTIMIZED": "1", "RAY_SERVE_ENABLE_HA_PROXY": "1"}
# HAProxy ends an older process of its own with its streams after so long: not before ``ingress.drain_s`` is over.
CLUSTER_ONLY |= {"RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "630"}


class LaunchError(ValueError):
    """Why the application could not be brought up."""


@contextlib.contextmanager
def local_ray(
    console: Console, cpus: int | None = None, shows_logs: bool = False, dashboard_port: int = DASHBOARD_PORT
) -> Iterator[str]:
    """A Ray of our own for the duration; yields its dashboard's address and leaves no process behind.

    ``shows_logs``: what replicas and ingresses log goes to stderr too. ``dashboard_port``: where that is free; 0: any.
    """
    before = set(psutil.Process().children(recursive=True))
    os.environ.update({name: os.environ.get(name, value) for name, value in QUIET.items()})
    os.environ.update(with_project(os.environ))
    with contextlib.ExitStack() as stack:
        stack.enter_context(terminable())
        folder = stack.enter_context(folder_of_ours(None))
        sockets = stack.enter_context(folder_of_ours("/tmp"))  # paths of sockets are short
        first_port = stack.enter_context(block_of_ports())
        stack.callback(remove_abandoned, Path(tempfile.gettempdir()))  # of engines, which are killed
        stack.enter_context(no_process_but(before))
        with steps_shown(console, "Starting Ray"), _environment(CLUSTER_ONLY | proxy_settings(sockets, first_port)):
            port = _start_ray(str(folder), cpus, dashboard_port)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, _end)  # Ray has put a handler of its own in place of ours
        stack.callback(_ending.set)
        if shows_logs:
            stack.enter_context(logs_shown(folder))
        yield f"http://127.0.0.1:{port}"


def with_project(environment: Mapping[str, str]) -> dict[str, str]:
    """``environment`` in which Python finds this project's packages."""
    root = str(Path(__file__).resolve().parents[2])
    return {**environment, "PYTHONPATH": os.pathsep.join(filter(None, (root, environment.get("PYTHONPATH"))))}


def proxy_settings(folder: Path, first_port: int) -> dict[str, str]:
    """What tells Ray where its HAProxy and its ingresses keep out of those of another fleet.

    The fallback proxy above all: two of them would share one port, and each answer half of the other fleet's requests.
    """
    return {
        **{name: str(first_port + position) for position, name in enumerate(SINGLE_PORTS)},
        SETTING: str(write_launcher(folder)),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(first_port + len(SINGLE_PORTS)),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(first_port + PORTS.step - 2),
    }


def free_port(preferred: int = 0) -> int:
    """``preferred`` where nothing listens on it, else some port of the loopback that no connection will get."""
    for port in filter(None, (preferred, *random.sample(FREE_PORTS, 100))):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return int(probe.getsockname()[1])
    raise LaunchError("no free port on 127.0.0.1")


@contextlib.contextmanager
def block_of_ports() -> Iterator[int]:
    """A block of ports for Serve's proxies and for ingresses that no other fleet of ours takes; yields its first port.

    Fleets must not share a range: a proxy whose ingress is gone would find another fleet's on its port, healthy.
    Nor may HAProxy's ports be any free ones: it binds them a minute later, and by then a connection may have them.
    """
    for claimed in PORTS:
        with socket.socket() as claim:
            try:
                claim.bind(("127.0.0.1", claimed))
            except OSError:
                continue
            singles = range(claimed + 1, claimed + 1 + len(SINGLE_PORTS))
            if all(free_port(port) == port for port in singles):
                yield claimed + 1
                return
    raise LaunchError(f"no free block of ports from {PORTS.start} to {PORTS.stop} on 127.0.0.1")


@contextlib.contextmanager
def folder_of_ours(parent: str | None) -> Iterator[Path]:
    """A temporary folder that nobody else reads; ``parent`` None: where temporary files belong."""
    folder = Path(tempfile.mkdtemp(prefix="polyslo-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def no_process_but(before: set[psutil.Process]) -> Iterator[None]:
    """At the end Ray is stopped, and so is every child of this process that was not there ``before``."""
    try:
        yield
    finally:
        with uninterrupted():
            started = set(psutil.Process().children(recursive=True)) - before
            with ended_without_us(started):
                ray.shutdown()
                end_processes(started)


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """``variables`` in the environment for the duration, unless the user has set them."""
    added = [name for name in variables if name not in os.environ]
    os.environ.update({name: variables[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def _start_ray(folder: str, cpus: int | None, dashboard_port: int) -> int:
    """Start Ray with its dashboard; the dashboard's port, another one where somebody was faster."""
    for preferred in (dashboard_port, 0, 0):
        port = free_port(preferred)
        try:
            ray.init(
                address="local",
                num_cpus=cpus,
                include_dashboard=True,
                dashboard_host="127.0.0.1",
                dashboard_port=port,
                _temp_dir=folder,
                log_to_driver=False,
                logging_level="ERROR",
                namespace="polyslo",
            )
            return port
        except Exception as error:
            ray.shutdown()
            if "address already in use" not in str(error):
                raise LaunchError(f"Ray did not start: {str(error).strip().splitlines()[-1]}") from None
    raise LaunchError("Ray did not start: every port for its dashboard was taken meanwhile")


_ending = threading.Event()  # this process unwinds: a second SIGTERM stops nothing of that


def _end(*_: object) -> None:
    if not _ending.is_set():
        _ending.set()
        sys.exit(128 + signal.SIGTERM)


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM unwinds this process as Ctrl-C does, so that what it has started is stopped."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _ending.clear()
    previous = signal.signal(signal.SIGTERM, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """A second Ctrl-C, or SIGTERM, does not stop the clean-up.

    While Ray's core shuts down, SIGTERM still does: Ray restores its default action (``ended_without_us``).
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ends = (signal.SIGINT, signal.SIGTERM)
    previous = [signal.signal(end, signal.SIG_IGN) for end in ends]
    try:
        yield
    finally:
        for end, handler in zip(ends, previous, strict=True):
            signal.signal(end, handler)
