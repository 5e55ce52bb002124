"""An engine on a CPU yields to the processes that decide and stream, also where Linux shares cores among sessions."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from replicas.vllm_executor import CORES, CPU_NICENESS, PARENT, THREADS

AUTOGROUP = Path("/proc/self/autogroup")
PROGRAM = """
import os
from replicas.vllm_executor import bind_to_cores, die_with_parent
before = os.nice(0)
die_with_parent()
bind_to_cores()
print(os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid(), os.nice(0) - before)
try:
    print(open("/proc/self/autogroup").read().split()[-1])
except OSError:
    print("none")
"""


@pytest.mark.parametrize("leads_a_group", [False, True])
def test_it_leads_a_session_of_its_own_unless_it_leads_a_group(leads_a_group: bool) -> None:
    environment = {PARENT: str(os.getpid()), CORES: "", THREADS: "1", "VLLM_TARGET_DEVICE": "cpu"}
    told = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
        process_group=0 if leads_a_group else None,
    )
    lines = told.stdout.splitlines()
    assert lines[:1] == [f"{not leads_a_group} True {CPU_NICENESS}"], told.stderr
    if AUTOGROUP.exists() and not leads_a_group:
        assert lines[1] == str(CPU_NICENESS)
