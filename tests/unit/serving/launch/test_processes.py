"""What is left of processes that we started, whoever ends us."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from serving.launch import processes
from serving.launch.processes import end_processes, ended_without_us

ROOT = Path(__file__).resolve().parents[4]
SLEEPS = [sys.executable, "-c", "import time; time.sleep(60)"]
KILLED = """
import os, signal, sys
import psutil
from serving.launch.processes import ended_without_us

with ended_without_us({psutil.Process(int(sys.argv[1]))}):
    os.kill(os.getpid(), signal.SIG%s)
"""


@pytest.fixture
def child() -> Iterator[psutil.Process]:
    """One in a session of its own, as engines are."""
    with subprocess.Popen(SLEEPS, start_new_session=True) as started:
        yield psutil.Process(started.pid)
        started.kill()


def has_ended(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("end", ["TERM", "KILL"])
def test_who_is_killed_while_it_cleans_up_leaves_no_process(child: psutil.Process, end: str) -> None:
    script = [sys.executable, "-c", KILLED % end, str(child.pid)]
    assert subprocess.run(script, cwd=ROOT).returncode < 0
    give_up_s = time.monotonic() + 30.0
    while not has_ended(child) and time.monotonic() < give_up_s:
        time.sleep(0.05)
    assert has_ended(child)


def test_who_is_killed_while_it_tells_them_leaves_none_of_those_told(child: psutil.Process) -> None:
    told = f"{child.pid} {child.create_time()!r}\n{child.pid} 1"
    assert subprocess.run([sys.executable, processes.__file__], input=told, text=True).returncode == 0
    assert has_ended(child)


def test_who_is_not_killed_ends_them_by_itself(child: psutil.Process) -> None:
    before = set(psutil.Process().children())  # other tests' helpers among them
    with ended_without_us({child}):
        waiting = set(psutil.Process().children()) - before
    assert waiting
    assert not any(each.is_running() for each in waiting)
    assert not has_ended(child)
    end_processes({child}, patience_s=0.1)
    assert has_ended(child)
