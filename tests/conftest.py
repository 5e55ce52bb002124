"""What all tests share: the order of the run, visible skips, the shared data folder and a check that nothing leaks."""

import itertools
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import psutil
import pytest

from serving.launch.leave import leave

ROOT = Path(__file__).resolve().parent.parent
LEAK_BOUND_S = 20.0
os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"  # read when ray is imported: a call to Ray never starts a cluster unasked
LAST = ("integration", "cluster", "gpu")  # in this order, after everything else

# No deadline: a busy machine is no failure. On CI the same examples every time.
hypothesis.settings.register_profile("polyslo", deadline=None, derandomize=os.environ.get("CI") == "true")
hypothesis.settings.register_profile("hostile", deadline=None, max_examples=10_000)
hypothesis.settings.load_profile("polyslo")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cluster", action="store_true", help="also run the tests that bring up a multi-node cluster")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: max((1 + LAST.index(m.name) for m in item.iter_markers() if m.name in LAST), default=0))
    skip = {}
    if not config.getoption("--cluster"):
        skip["cluster"] = pytest.mark.skip(reason="brings up a Ray cluster of several nodes: make test-cluster")
    if shutil.which("nvidia-smi") is None:
        skip["gpu"] = pytest.mark.skip(reason="no NVIDIA GPU on this machine")
    for item in items:
        for name, mark in skip.items():
            if item.get_closest_marker(name):
                item.add_marker(mark)


STATUS = pytest.StashKey[int]()


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    session.config.stash[STATUS] = int(exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """A run that started Ray ends without the destructors that Ray's threads may crash in."""
    if STATUS in config.stash:
        leave(config.stash[STATUS])


@pytest.fixture(autouse=True)
def same_names(request: pytest.FixtureRequest) -> None:
    """Requests have the same ids whatever ran before in this process: where all else is equal, ids decide."""
    for module in (request.module, sys.modules.get("tests.support.fleet_cases")):
        if isinstance(getattr(module, "counter", None), itertools.count):
            setattr(module, "counter", itertools.count())  # noqa: B010  (mypy knows no modules' names)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of traces, profiles and papers beside the project."""
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        pytest.skip("no ../shared beside the project: its traces and measured profiles are not part of it")
    return folder


@pytest.fixture(scope="session", autouse=True)
def no_process_left() -> Iterator[None]:
    """Whatever the tests started is gone at the end: engines, Ray, servers."""
    yield
    left = _children()
    deadline_s = time.monotonic() + LEAK_BOUND_S
    while left and time.monotonic() < deadline_s:
        psutil.wait_procs(left, timeout=0.2)
        left = _children()
    assert not left, f"processes left behind: {[(p.pid, ' '.join(p.cmdline())[:120]) for p in left]}"


def _children() -> list[psutil.Process]:
    """Live descendants of the test run, less multiprocessing's own tracker, which ends with its parent."""
    alive = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.status() != psutil.STATUS_ZOMBIE and "resource_tracker" not in " ".join(process.cmdline()):
                alive.append(process)
        except psutil.NoSuchProcess:
            continue
    return alive
