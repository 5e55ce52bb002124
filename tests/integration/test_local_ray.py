"""A Ray of our own ends with the process that started it, whatever ends that."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
TERMINATED = """
import os, signal, time
from rich.console import Console
from serving.launch.local_ray import local_ray

with local_ray(Console(quiet=True), cpus=1, dashboard_port=0):
    print("up", flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
"""


def test_a_termination_after_ray_has_started_still_cleans_up() -> None:
    """Ray's own handler ends its driver with an abort, which leaves folders behind."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # a short path: sockets are below it
        environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": folder}
        ended = subprocess.run([sys.executable, "-c", TERMINATED], env=environment, capture_output=True, text=True)
        assert ended.stdout.startswith("up"), ended.stderr
        assert ended.returncode == 143, ended.stderr
        assert not list(Path(folder).glob("polyslo-*"))
