"""Bring the application up on a local or a running Ray cluster, wait until it serves, take it down again."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import yaml
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from serving.config.app import IMPORT_PATH, read_serve_file
from serving.config.base import ConfigError
from serving.config.serve_schema import check_serve_keys
from serving.config.tiers import TierTableConfig
from serving.launch.dashboard import serve_client
from serving.launch.local_ray import LaunchError, local_ray, with_project
from serving.launch.running import announced

START_LIMIT_S = 600.0


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
        stack.enter_context(announced(url_of(document), address))
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
    try:
        check_serve_keys(document)
    except ConfigError as error:
        raise ConfigError("\n".join(f"{config}: {line}" for line in str(error).splitlines())) from None
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
        subprocess.run([sys.executable, "-m", "controller.warmup"], check=True, env=with_project(os.environ))


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


def is_healthy(url: str) -> bool:
    """Whether the ingress answers and at least one replica lives."""
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
