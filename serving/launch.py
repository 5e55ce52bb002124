"""Bring the application up on a local or a running Ray cluster, wait until it serves, take it down again."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import psutil
import ray
import yaml
from ray.dashboard.modules.serve.sdk import ServeSubmissionClient
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from serving.config import IMPORT_PATH, read_serve_file
from serving.strict import ConfigError
from serving.tiers import TierTableConfig

DASHBOARD_PORT = 8265
START_LIMIT_S = 600.0
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",  # Ray's 15 starves engines on a CPU behind everything else on the machine
    "PYTHONWARNINGS": "ignore",
}

# For the cluster, never for a driver: tokens go from the ingress straight to HAProxy, calls by gRPC.
CLUSTER_ONLY = {"RAY_SERVE_THROUGHPUT_OPTIMIZED": "1", "RAY_SERVE_ENABLE_HA_PROXY": "1"}


class LaunchError(ValueError):
    """Why the application could not be brought up."""


def up(config: Path, address: str | None = None, port: int | None = None) -> None:
    """Deploy ``config`` and stay up until Ctrl-C.

    Args:
        config: a Serve configuration file.
        address: the dashboard of a running cluster (http://host:8265); without it a local Ray is started and stopped.
        port: HTTP port in place of the file's.

    Raises:
        ConfigError, LaunchError: naming what is wrong.
    """
    console = Console(stderr=True)
    document = read_document(config, port)
    with contextlib.ExitStack() as stack:
        if address is None:
            check_port_free(document)
            compile_kernels(console)
            address = stack.enter_context(local_ray(console))
        deploy(address, document, console)
        console.print(f"Serving at [bold]{url_of(document)}[/bold]; Ctrl-C stops.")
        wait_for_interrupt()


def read_document(config: Path, port: int | None = None) -> dict[str, Any]:
    """The Serve file as a document, with every part of it that is ours checked."""
    app, user_config = read_serve_file(config)
    try:
        TierTableConfig.read(user_config).check_fits(app.most_replicas)
    except ConfigError as error:
        raise ConfigError(f"{config}: deployments.Ingress.user_config.{error}") from None
    document: dict[str, Any] = yaml.safe_load(config.read_text())
    if port is not None:
        document.setdefault("http_options", {})["port"] = port
    return document


def url_of(document: dict[str, Any]) -> str:
    """Where the deployed application answers."""
    options = document.get("http_options") or {}
    host = str(options.get("host", "127.0.0.1"))
    return f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{options.get('port', 8000)}"


def check_port_free(document: dict[str, Any]) -> None:
    """Say at once that the HTTP port is taken, which Serve would tell in a log file."""
    options = document.get("http_options") or {}
    host, port = str(options.get("host", "127.0.0.1")), int(options.get("port", 8000))
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise LaunchError(f"http_options.port: {host}:{port} cannot be used: {error.strerror}") from None


def compile_kernels(console: Console) -> None:
    """Fill the cache of compiled kernels once, so that controller and engines do not all compile at the same time."""
    with console.status("Compiling planning kernels (about a minute the first time)"):
        subprocess.run([sys.executable, "-m", "controller.warmup"], check=True, env=_with_project(os.environ))


def _with_project(environment: Mapping[str, str]) -> dict[str, str]:
    """``environment`` in which Python finds this project's packages."""
    root = str(Path(__file__).resolve().parent.parent)
    return {**environment, "PYTHONPATH": os.pathsep.join(filter(None, (root, environment.get("PYTHONPATH"))))}


def free_port(preferred: int = 0) -> int:
    """``preferred`` where nothing listens on it, else any free port of the loopback."""
    for port in (preferred, 0):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return int(probe.getsockname()[1])
    raise LaunchError("no free port on 127.0.0.1")


@contextlib.contextmanager
def local_ray(console: Console, cpus: int | None = None) -> Iterator[str]:
    """A Ray of our own for the duration; yields its dashboard's address and leaves no process behind."""
    folder = tempfile.mkdtemp(prefix="polyslo-")
    before = set(psutil.Process().children(recursive=True))
    os.environ.update({name: os.environ.get(name, value) for name, value in QUIET.items()})
    os.environ.update(_with_project(os.environ))
    try:
        with console.status("Starting Ray"), _environment(CLUSTER_ONLY):
            port = _start_ray(folder, cpus)
        yield f"http://127.0.0.1:{port}"
    finally:
        with uninterrupted():
            started = set(psutil.Process().children(recursive=True)) - before
            ray.shutdown()
            end_processes(started)
            shutil.rmtree(folder, ignore_errors=True)


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


def _start_ray(folder: str, cpus: int | None) -> int:
    """Start Ray with its dashboard; the dashboard's port, another one where somebody was faster."""
    for preferred in (DASHBOARD_PORT, 0, 0):
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


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """A second Ctrl-C does not stop the clean-up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


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


def deploy(address: str, document: dict[str, Any], console: Console) -> None:
    """Send the document to Serve as ``serve deploy`` does, and wait with a progress display until it runs."""
    client = serve_client(address)
    client.deploy_applications(document)
    names = [app.get("name", "default") for app in document["applications"] if app["import_path"] == IMPORT_PATH]
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        shown = progress.add_task("Deploying")
        give_up_s = time.monotonic() + START_LIMIT_S
        while time.monotonic() < give_up_s:
            details = client.get_serve_details()["applications"].get(names[0], {})
            if details.get("status") == "RUNNING" and is_healthy(url_of(document)):
                return
            if details.get("status") in ("DEPLOY_FAILED", "UNHEALTHY"):
                raise LaunchError(f"the application did not start: {last_line(details)}")
            progress.update(shown, description=describe(details))
            time.sleep(0.25)
    raise LaunchError(f"the application did not start within {START_LIMIT_S:g} s")


def serve_client(address: str) -> ServeSubmissionClient:
    """Serve's own client of the cluster's dashboard at ``address``."""
    return ServeSubmissionClient(address)


def is_healthy(url: str) -> bool:
    """Whether the door answers and at least one replica lives."""
    try:
        return httpx.get(f"{url}/health", timeout=5.0).status_code == 200
    except httpx.HTTPError:
        return False


def describe(details: dict[str, Any]) -> str:
    """One line on how far a deployment has come."""
    parts = []
    for name, deployment in details.get("deployments", {}).items():
        states = [replica.get("state") for replica in deployment.get("replicas", [])]
        wanted = deployment.get("target_num_replicas") or len(states)
        parts.append(f"{name} {states.count('RUNNING')}/{wanted}")
    return "Starting " + ", ".join(parts) if parts else "Deploying"


def last_line(details: dict[str, Any]) -> str:
    """What a person needs of Serve's message, which holds a whole traceback."""
    told = [details.get("message", "")] + [d.get("message", "") for d in details.get("deployments", {}).values()]
    lines = [line.strip() for text in told for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "Error: " in line or "Exception: " in line]
    return (errors or lines or ["no reason given"])[-1]


def wait_for_interrupt() -> None:
    """Block until SIGINT or SIGTERM."""
    stop = threading.Event()
    previous = signal.signal(signal.SIGTERM, lambda *_: stop.set())
    try:
        while not stop.wait(0.5):
            pass
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGTERM, previous)


def demo(once: bool = False) -> None:
    """See ``serving.demo``."""
    from serving.demo import run

    run(once)
