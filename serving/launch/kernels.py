"""The cache of compiled planning kernels, filled once per version of them while other things start."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numba
from rich.console import Console

import profiles.jit  # noqa: F401  (tells numba where the cache is)
from serving.launch.local_ray import LaunchError, with_project

POLL_S = 0.5


class Compilation:
    """A process that runs every kernel that a live fleet calls."""

    def __init__(self) -> None:
        self._folder = Path(numba.config.CACHE_DIR)
        self._before = compiled(self._folder)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "serving.launch.warmup"],
            env=with_project(os.environ),
            stderr=subprocess.PIPE,
            text=True,
        )

    def progress(self) -> str:
        """How far it is in one line, empty once it is done; raises ``LaunchError`` with its last line if it failed."""
        if self._process.returncode == 0:
            return ""
        with contextlib.suppress(subprocess.TimeoutExpired):
            _, told = self._process.communicate(timeout=POLL_S)
            if self._process.returncode:
                last = next(reversed([line for line in told.splitlines() if line.strip()]), "no reason given")
                raise LaunchError(f"planning kernels could not be compiled: {last}")
            return ""
        if (now := compiled(self._folder)) > self._before:
            return f"Compiling planning kernels, once after an update: {now} so far"
        return "Loading planning kernels"

    def wait(self, console: Console) -> None:
        """Show how far it is until it is done; raises as ``progress`` does."""
        with console.status("Loading planning kernels") as shown:
            while line := self.progress():
                shown.update(line)

    def stop(self) -> None:
        """End it where it still runs."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate()


def compiled(folder: Path) -> int:
    """Kernels in the cache."""
    return sum(1 for _ in folder.rglob("*.nbc"))


@contextlib.contextmanager
def compiling() -> Iterator[Compilation]:
    """Compile beside what the block does. Controllers and engines on this machine wait for it by themselves."""
    compilation = Compilation()
    try:
        yield compilation
    finally:
        compilation.stop()


def compile_kernels(console: Console) -> None:
    """Fill the cache, so that controller and engines do not all compile at the same time."""
    with compiling() as compilation:
        compilation.wait(console)
