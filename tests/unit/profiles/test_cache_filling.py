"""Who starts while another process fills the cache of kernels waits for it, and never for a process that has died."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numba
import pytest

from profiles.cache_filling import LOCK, await_filled, filling

FILL = """
import sys
from profiles.cache_filling import filling
with filling():
    print("filling", flush=True)
    sys.stdin.read(1)
"""


@pytest.fixture
def other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[str]]:
    """Another process, which fills the same folder until it is told something or dies."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    command = [sys.executable, "-c", FILL]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "filling\n"
        yield process
        process.kill()


@pytest.mark.parametrize("dies", [False, True])
def test_others_wait_until_it_is_filled_or_its_process_has_died(other: subprocess.Popen[str], dies: bool) -> None:
    waiting = threading.Thread(target=await_filled, daemon=True)
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive()
    if dies:
        other.kill()
    else:
        other.communicate("x")
    waiting.join(30.0)
    assert not waiting.is_alive()


def test_who_fills_does_not_wait_for_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    with filling():
        await_filled()
    await_filled()
    assert (tmp_path / LOCK).exists()


def test_a_folder_that_cannot_be_written_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "file"))
    await_filled()
    with filling():
        pass
