"""Kernels are compiled in a process of their own, which ends with its caller and whose failure is told."""

import io
import os
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

from serving.launch import kernels
from serving.launch.kernels import compile_kernels, compiling
from serving.launch.local_ray import LaunchError


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for the process that compiles."""
    path = tmp_path / "python"
    path.touch(0o700)
    monkeypatch.setattr(kernels.sys, "executable", str(path))
    monkeypatch.setattr(kernels, "POLL_S", 0.01)
    monkeypatch.setattr(kernels.numba.config, "CACHE_DIR", str(tmp_path))
    return path


def test_failure_is_told_by_its_last_line(compiler: Path) -> None:
    compiler.write_text("#!/bin/sh\necho first >&2\necho no compiler here >&2\nexit 3\n")
    with pytest.raises(LaunchError, match="could not be compiled: no compiler here"):
        compile_kernels(Console(file=io.StringIO()))


def test_progress_counts_what_is_compiled(compiler: Path) -> None:
    folder = compiler.parent
    compiler.write_text(f"#!/bin/sh\ntouch {folder}/a.nbc {folder}/b.nbc\nread line < {folder}/go\n")
    os.mkfifo(folder / "go")
    shown = io.StringIO()

    def let_go() -> None:
        give_up_s = time.monotonic() + 30.0
        while "2 so far" not in shown.getvalue() and time.monotonic() < give_up_s:
            pass
        (folder / "go").write_text("on\n")

    thread = threading.Thread(target=let_go, daemon=True)
    thread.start()
    compile_kernels(Console(file=shown, force_terminal=True, width=100))
    thread.join()
    assert "2 so far" in shown.getvalue()


def test_it_ends_with_its_caller(compiler: Path) -> None:
    compiler.write_text("#!/bin/sh\nexec sleep 600\n")
    with compiling() as compilation:
        process = compilation._process
        assert process.poll() is None
    assert process.poll() is not None


def test_progress_is_empty_from_the_end_on(compiler: Path) -> None:
    compiler.write_text("#!/bin/sh\nexit 0\n")
    with compiling() as compilation:
        while compilation.progress():
            pass
        assert compilation.progress() == ""
