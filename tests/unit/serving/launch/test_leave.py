"""The end of a process that has been Ray's driver."""

import subprocess
import sys

import pytest

PROGRAM = """
import atexit
atexit.register(print, 'ordinary end')
import {module}
from serving.launch.leave import leave
print('said', end=' ')
leave(3)
"""


@pytest.mark.parametrize(("module", "status", "said"), [("ray", 3, "said "), ("json", 0, "said ordinary end\n")])
def test_only_a_process_with_ray_ends_at_once(module: str, status: int, said: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(module=module)], capture_output=True, text=True, timeout=120
    )
    assert (ended.returncode, ended.stdout) == (status, said), ended.stderr
