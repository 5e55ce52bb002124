"""Another package with the name of one of ours is named with its path."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from serving.cli.collisions import ROOMS, check_rooms

ROOT = Path(__file__).resolve().parents[4]


def test_every_installed_room_is_checked() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert {pattern.removesuffix("*") for pattern in setuptools["packages"]["find"]["include"]} == set(ROOMS)
    check_rooms()


@pytest.mark.parametrize("name", ["simulation/__init__.py", "routing.py"])
def test_a_foreign_package_is_named(tmp_path: Path, name: str) -> None:
    foreign = tmp_path / name
    foreign.parent.mkdir(exist_ok=True)
    foreign.touch()
    path = os.pathsep.join(map(str, (tmp_path, ROOT)))
    command = [sys.executable, "-m", "serving.cli.commands", "--help"]
    told = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=60
    )
    assert told.returncode == 2
    assert told.stderr.startswith("polyslo: error: other packages hide those of polyslo")
    assert str(foreign) in told.stderr
