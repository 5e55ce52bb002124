"""The rooms of docs/architecture.md: who may import whom, and how large a file or a function may grow."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PURE_ROOMS = ("profiles", "protocol", "planning", "routing", "controller", "simulation")
ROOMS = (*PURE_ROOMS, "replicas", "serving", "benchmarks")
SERVING = ("batches", "cli", "config", "dispatch", "ingress", "launch", "loadgen", "plug_in", "request")
SHELLS = {
    "controller.actor",
    "controller.checkpoint_keeper",
    "controller.launch",
    "controller.length_trainer",
    "controller.serve_scaler",
    "controller.shards.keeper",
    "controller.size_keeper",
}  # modules of pure rooms that are shells
# Python runs their __init__ wherever one module is wanted.
EMPTY_ON_IMPORT = (
    "controller",
    "replicas",
    "serving",
    *(f"serving/{room}" for room in SERVING),
)
ADAPTERS = {  # package -> the modules that may know it
    "vllm": r"replicas\.vllm_\w+|serving\.(config|ingress|loadgen|plug_in)\.vllm_\w+|serving\.cli\.bench"
    r"|replicas\.(profiling|timed_(batches|executor|worker))",
    "torch": r"replicas\.(vllm_(executor|kv_files)|profiling|timed_(batches|executor|worker))",
    "ray": r"controller\.(actor|launch|length_trainer|serve_scaler|shards\.keeper)"
    r"|replicas\.(deployment|pinned_router|reporter|vllm_ray_executor)"
    r"|serving\.(app|batches\.keeper|launch\.(dashboard|launch|local_ray)|dispatch\.(controller_link|upgrader|transport)|config\.serve_schema)",
    "ray.serve.request_router": r"replicas\.pinned_router",  # an alpha API of Serve's
}
FILE_LINES, FUNCTION_LINES = 300, 60

IMPORT_BLOCKED = """
import importlib, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"ray", "vllm", "torch"}:
            raise ImportError(f"{name} is blocked here")

sys.meta_path.insert(0, Blocked())
for name in sys.argv[1:]:
    importlib.import_module(name)
"""


def sources(*folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from sorted((ROOT / folder).rglob("*.py"))


def modules(room: str) -> list[str]:
    paths = (path.relative_to(ROOT).with_suffix("") for path in sources(room))
    return [".".join(path.parts).removesuffix(".__init__") for path in paths]


def import_blocked(*names: str) -> subprocess.CompletedProcess[str]:
    """Imports ``names`` in a fresh interpreter where ray, vllm and torch cannot be imported."""
    command = [sys.executable, "-c", IMPORT_BLOCKED, *names]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_imports_go_one_way() -> None:
    """The contracts of [tool.importlinter] in pyproject.toml hold."""
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_page_on_architecture_names_all_shells_of_the_controller() -> None:
    (row,) = re.findall(r"^\| `controller/` \|.*", (ROOT / "docs" / "architecture.md").read_text(), re.MULTILINE)
    named = re.findall(r"`([\w/]+)\.py`", row.split("its shells are")[1])
    assert {"controller." + name.replace("/", ".") for name in named} == SHELLS


@pytest.mark.parametrize("room", PURE_ROOMS)
def test_pure_room_needs_no_engine(room: str) -> None:
    result = import_blocked(*(name for name in modules(room) if name not in SHELLS))
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("name", ["ray", "vllm.config", "torch"])
def test_blocked_import_is_noticed(name: str) -> None:
    assert "is blocked here" in import_blocked(name).stderr


def imported(path: Path) -> Iterator[str]:
    """Every module that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


@pytest.mark.parametrize("package", sorted(ADAPTERS))
def test_only_adapters_know(package: str) -> None:
    knowing = set()
    for path in sources(*(room for room in ROOMS if room != "benchmarks")):
        if any(f"{name}.".startswith(f"{package}.") for name in imported(path)):
            knowing.add(".".join(path.relative_to(ROOT).with_suffix("").parts))
    assert knowing, f"nothing imports {package} any more"
    assert not {name for name in knowing if not re.fullmatch(ADAPTERS[package], name)}


@pytest.mark.parametrize("room", EMPTY_ON_IMPORT)
def test_init_stays_empty(room: str) -> None:
    assert (ROOT / room / "__init__.py").read_text() == ""


def test_files_and_functions_stay_small() -> None:
    too_long = []
    for path in sources(*ROOMS, "tests", "requirements"):
        text = path.read_text()
        where = path.relative_to(ROOT)
        if (lines := text.count("\n")) > FILE_LINES:
            too_long.append(f"{where}: {lines} lines, cap {FILE_LINES}")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > FUNCTION_LINES:
                    too_long.append(f"{where}:{node.lineno} {node.name}: {lines} lines, cap {FUNCTION_LINES}")
    assert not too_long, "\n".join(too_long)
