import os
import subprocess
import sys
from pathlib import Path

from planning.batch import form_batch
from planning.choice import choose
from planning.rollout import advance
from planning.warmup import warm_up

ROOT = Path(__file__).resolve().parents[3]


def test_every_entry_point_is_compiled_at_start_up() -> None:
    warm_up()
    for kernel in (form_batch, choose, advance):
        assert kernel.signatures, f"{kernel.__name__} would compile on a user's request"


def test_the_same_source_runs_without_the_compiler() -> None:
    """Deadlines, batch formation, rollouts and admission once more as plain Python."""
    files = [
        str(ROOT / "tests/unit/planning" / f"test_{name}.py") for name in ("deadlines", "batch", "rollout", "admission")
    ]
    command = [sys.executable, "-W", "ignore", "-m", "pytest", "-q", "--no-header", "-k", "not programme_takes", *files]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"NUMBA_DISABLE_JIT": "1"}, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stdout[-3000:]
