"""What every start runs first: without it neither the controller nor ``polyslo serve`` comes up."""

import os
import subprocess
import sys


def test_warm_up_runs_as_plain_python_without_a_warning() -> None:
    """A division by zero only warns there; compiled, it ends the start."""
    command = [sys.executable, "-W", "error", "-m", "controller.warmup"]
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
