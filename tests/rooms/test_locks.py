"""The locked lists answer what pyproject.toml asks for, and leave out what breaks a CPU environment."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ON_TOP = {"cpu": [], "gpu": [], "dev": ["cpu"], "profiles": ["cpu"]}


def locked(*names: str) -> dict[str, str]:
    """Package -> version of the named lists together."""
    lines = [line for name in names for line in (ROOT / "requirements" / f"{name}.lock").read_text().splitlines()]
    pins = [re.split("={2,3}", line) for line in lines if not line.startswith("#")]
    assert all(len(pin) == 2 for pin in pins)
    return {canonicalize_name(name): version for name, version in pins}


@pytest.mark.parametrize("extra", sorted(PROJECT["optional-dependencies"]))
def test_lock_answers_the_project(extra: str) -> None:
    versions = locked(*ON_TOP[extra], extra)
    for text in PROJECT["dependencies"] + PROJECT["optional-dependencies"][extra]:
        wanted = Requirement(text)
        assert wanted.specifier.contains(versions[canonicalize_name(wanted.name)], prereleases=True), text


@pytest.mark.parametrize("extra", ["dev", "profiles"])
def test_lists_on_top_repeat_nothing(extra: str) -> None:
    assert not locked(extra).keys() & locked("cpu").keys()


def test_cpu_list_holds_the_cpu_build_and_no_cuda_extensions() -> None:
    versions = locked("cpu")
    assert versions["torch"].endswith("+cpu")
    assert not {"torchvision", "torchaudio", "torchcodec"} & versions.keys()
    assert not {name for name in versions if name.startswith("nvidia-")}


def test_gpu_list_holds_the_cuda_build() -> None:
    versions = locked("gpu")
    assert "+" not in versions["torch"]
    assert f"torch==={versions['torch']}" in (ROOT / "requirements" / "gpu.lock").read_text().splitlines()
    assert {"nvidia-cudnn-cu13", "nvidia-nccl-cu13", "triton"} <= versions.keys()
