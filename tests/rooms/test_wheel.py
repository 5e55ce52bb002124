"""The wheel holds the rooms and the starter files, and nothing that is not meant for users."""

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
SHIPPED = [pattern.removesuffix("*") for pattern in SETUPTOOLS["packages"]["find"]["include"]]
STARTER = ("serve.yaml", "cluster.yaml", "cluster-local.yaml", "deploy", "examples")
LEFT_OUT = ("benchmarks", "tests", "docs", "stubs", "requirements")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Path -> content of the wheel's files, built in a folder of links so that this one stays as it is."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", *SHIPPED, "benchmarks", "tests", "docs"):
        (source / name).symlink_to(ROOT / name)
    code = "import sys, setuptools.build_meta as build; build.build_wheel(sys.argv[1])"
    command = [sys.executable, "-c", code, str(folder)]
    built = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=120)
    assert built.returncode == 0, built.stderr[-2000:]
    (path,) = folder.glob("polyslo-*.whl")
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def below(*tops: str) -> dict[str, bytes]:
    """Path -> content of files of the repository."""
    found = [path for top in tops for path in (ROOT / top, *(ROOT / top).rglob("*"))]
    files = [path for path in found if path.is_file() and "__pycache__" not in path.parts]
    return {str(path.relative_to(ROOT)): path.read_bytes() for path in files}


def test_every_module_of_the_rooms_is_in_it(wheel: dict[str, bytes]) -> None:
    modules = {name: content for name, content in below(*SHIPPED).items() if name.endswith(".py")}
    assert modules
    assert {name: wheel.get(name) for name in modules} == modules


def test_the_page_of_the_dashboard_is_in_it(wheel: dict[str, bytes]) -> None:
    pages = {name: content for name, content in below(*SHIPPED).items() if name.endswith(".html")}
    assert pages
    assert {name: wheel.get(name) for name in pages} == pages


def test_nothing_else_is_in_it(wheel: dict[str, bytes]) -> None:
    tops = {name.partition("/")[0] for name in wheel}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(SHIPPED)
    assert not tops & set(LEFT_OUT)


def test_starter_files_are_those_at_the_top(wheel: dict[str, bytes]) -> None:
    """One copy in the repository: what the wheel has below ``serving/starter`` are links there."""
    prefix = "serving/starter/"
    packaged = {name.removeprefix(prefix): content for name, content in wheel.items() if name.startswith(prefix)}
    assert packaged == below(*STARTER)
    assert all((ROOT / prefix / name).resolve() == ROOT / name for name in STARTER)
