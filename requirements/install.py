"""Sets up ``.venv`` from the locked lists: ``python requirements/install.py [cpu.lock dev.lock ...]``.

Standard library only. Needs Python 3.11-3.13 and pip's ordinary configuration. A CPU build of torch comes from where
pip looks by itself; only where that has none, from PyTorch's own index. What is installed already is left alone.
A list may be a path, too. ``POLYSLO_VENV`` names another folder than ``.venv``.
"""

import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / os.environ.get("POLYSLO_VENV", ".venv")
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
SHOWN_EVERY = 20  # packages, where the output is not a terminal


def pip(arguments: list[str], title: str, packages: int) -> str:
    """Runs ``pip install --no-deps`` with one line of progress; pip's last words when it fails, else nothing."""
    command = [VENV / "bin" / "python", "-m", "pip", "install", "--no-deps", "--no-input", "--progress-bar", "off"]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT
        )
        assert process.stdout is not None
        seen = 0
        for line in process.stdout:
            log.write(line)
            if line.startswith(("Collecting ", "Processing ", "Requirement already satisfied: ")):
                seen += 1
                show(title, seen, packages, line.partition(": ")[2] or line.partition(" ")[2])
            elif line.startswith("Installing collected"):
                show(title, packages, packages, "writing files")
        if process.wait() == 0:
            return ""
        log.seek(0)
        return "".join([line for line in log if not line.startswith("WARNING: Location")][-12:])


def show(title: str, seen: int, packages: int, what: str) -> None:
    """``what`` is a package, the path of its file, or "writing files"."""
    what = what.split(" (from")[0].split(" in ")[0].rpartition("/")[2].strip()
    if sys.stdout.isatty():
        print(f"\r\033[K{title}: {seen}/{packages} {what}", end="\n" if what == "writing files" else "", flush=True)
    elif seen % SHOWN_EVERY == 0 or what == "writing files":
        print(f"{title}: {seen}/{packages} {what}", flush=True)


def locked(name: str) -> list[str]:
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def install_torch(requirement: str) -> str:
    """``requirement`` names the CPU build exactly, so nothing else can be taken for it."""
    if not pip([requirement], "torch", 1):
        return ""
    print(f"pip finds no {requirement} by itself; trying {TORCH_INDEX}", flush=True)
    failure = pip([requirement, "--index-url", TORCH_INDEX], "torch", 1)
    hint = "Where that index cannot be reached, name a folder that holds the wheel: PIP_FIND_LINKS=/wheels make setup\n"
    return failure and failure + hint


def main(locks: list[str]) -> int:
    if not (3, 11) <= sys.version_info[:2] < (3, 14):
        print(f"Python 3.11, 3.12 or 3.13 is needed; this is {sys.version.split()[0]}", file=sys.stderr)
        return 1
    if not (VENV / "bin" / "python").exists():
        print(f"making {VENV.name} with Python {sys.version.split()[0]}", flush=True)
        venv.create(VENV, with_pip=True, symlinks=True)
    os.environ["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
    requirements = [line for name in locks for line in locked(name)]
    torch = next((line for line in requirements if line.startswith("torch==") and "+cpu" in line), None)
    failure = install_torch(torch) if torch is not None else ""
    if not failure:
        rest = [line for line in requirements if line != torch]
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            file.write("\n".join(rest))
            file.flush()
            failure = pip(["-r", file.name], "packages", len(rest))
    failure = failure or pip(["--no-build-isolation", "--editable", "."], "polyslo", 1)
    print(failure, end="", file=sys.stderr)
    return 1 if failure else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["cpu.lock", "dev.lock"]))
