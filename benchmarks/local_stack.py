"""The whole stack on this machine, for benchmarks: a Ray of its own, HAProxy, ingresses, controller and replicas."""

import contextlib
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from controller.upgrade import CONTROLLER_PACKAGES
from serving.config.app import IMPORT_PATH
from serving.launch.launch import deploy, url_of
from serving.launch.local_ray import free_port, local_ray

START_S = 180.0
ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (*CONTROLLER_PACKAGES, "replicas", "serving")
CHANGED = "controller/upgrade.py"  # it holds no kernel, so nothing is compiled anew


def serve_document(args: dict[str, Any], tiers: list[dict[str, Any]], default_tier: str = "standard") -> dict[str, Any]:
    """The Serve file of one application with these ``args`` and tiers, on a port of its own."""
    table = {"version": 1, "default_tier": default_tier, "tiers": tiers}
    deployments = [{"name": "Ingress", "user_config": table}]
    application = {"name": "polyslo", "route_prefix": "/", "import_path": IMPORT_PATH, "args": args}
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": free_port()},
        "applications": [{**application, "deployments": deployments}],
    }


@contextlib.contextmanager
def serving_stack(document: dict[str, Any], replicas: int, console: Console, cpus: int | None = None) -> Iterator[str]:
    """A stack for the duration; yields its address once ``replicas`` report."""
    with local_ray(console, cpus=cpus) as address:
        deploy(address, document, console)
        wait_for_replicas(url_of(document), replicas)
        yield url_of(document)


def wait_for_replicas(url: str, replicas: int, limit_s: float = START_S) -> None:
    """Until so many report; raises ``TimeoutError``."""
    give_up_s = time.monotonic() + limit_s
    while (
        sum(replica["live"] for replica in httpx.get(f"{url}/polyslo/status", timeout=10).json()["replicas"]) < replicas
    ):
        if time.monotonic() > give_up_s:
            raise TimeoutError(f"not all {replicas} replicas reported within {limit_s:g} s")
        time.sleep(0.5)


@contextlib.contextmanager
def copied_code() -> Iterator[Path]:
    """This project's packages in a folder of their own, from which a Ray takes them that is started meanwhile."""
    with tempfile.TemporaryDirectory(prefix="polyslo-code-") as name:
        folder = Path(name)
        for package in PACKAGES:
            shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
        with contextlib.chdir(folder):
            yield folder


def change_code(folder: Path) -> None:
    """Other code for processes that start from now on."""
    with (folder / CHANGED).open("a") as file:
        file.write("# changed\n")
