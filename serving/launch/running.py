"""What runs on this machine: a file per ``polyslo serve`` or demo, by which other commands find it.

No secret is in it.
"""

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_DASHBOARD = "http://127.0.0.1:8265"


@dataclass(frozen=True)
class Running:
    """One application and the dashboard of the Ray that runs it."""

    url: str
    dashboard: str
    pid: int
    started_s: float  # of the process, since the epoch: a later process may get the same pid


def folder() -> Path:
    """Where the files are: the user's runtime folder, else the project's cache."""
    base = os.environ.get("XDG_RUNTIME_DIR") or os.environ.get("POLYSLO_CACHE") or Path.home() / ".cache"
    return Path(base) / "polyslo" / "running"


@contextlib.contextmanager
def announced(url: str, dashboard: str, place: int = 0) -> Iterator[None]:
    """Other commands find this process's application number ``place`` meanwhile, if the folder can be written."""
    process = psutil.Process()
    path = folder() / (f"{process.pid}-{place}.json" if place else f"{process.pid}.json")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump(asdict(Running(url, dashboard, process.pid, process.create_time())), file)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def running() -> list[Running]:
    """Applications whose process lives, the latest first; what a killed one has left is removed."""
    found = []
    for path in folder().glob("*.json"):
        try:
            each = Running(**json.loads(path.read_text()))
            if psutil.Process(each.pid).create_time() == each.started_s:
                found.append(each)
                continue
        except (OSError, ValueError, TypeError, psutil.Error):
            pass
        with contextlib.suppress(OSError):
            path.unlink()
    return sorted(found, key=lambda each: (-each.started_s, each.url))


def url_or(url: str | None) -> str:
    """``url``, else the application that was started last on this machine, else where one usually is."""
    return url or next((each.url for each in running()), DEFAULT_URL)


def dashboard_or(dashboard: str | None, url: str) -> str:
    """``dashboard``, else that of the Ray that runs the application at ``url``, else where one usually is."""
    return dashboard or next((each.dashboard for each in running() if each.url == url.rstrip("/")), DEFAULT_DASHBOARD)
