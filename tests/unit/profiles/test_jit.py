"""Compiled kernels are kept by what their sources say: an edit drops what depends on it, a move drops nothing."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest

from profiles import jit, kernels
from profiles.jit import KEPT_S, KernelLocator, imported, remove_old, source_digest
from profiles.kernels import iteration_s

FILES = {
    "planning/leaf.py": "LIMIT = 3\n",
    "planning/kernel.py": "from planning import (\n    leaf,\n)\n\ndef double(x):\n    return 2 * x + leaf.LIMIT\n",
    "planning/other.py": "import math\nimport numpy as np\n\ndef half(x):\n    return x / 2\n",
    "routing/top.py": "from planning.kernel import double  # twice\n\ndef top(x):\n    return double(x)\n",
}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for place in ("here", "there"):
        for name, text in FILES.items():
            (tmp_path / place / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / place / name).write_text(text)
    monkeypatch.setattr(jit, "ROOT", tmp_path / "here")
    forget()
    yield tmp_path / "here"
    forget()


def forget() -> None:
    imported.cache_clear()
    source_digest.cache_clear()


def digests(root: Path) -> dict[str, str]:
    forget()
    return {name: source_digest(root / name) for name in FILES}


def test_an_edit_changes_the_digest_of_what_imports_it_however_far_and_of_nothing_else(root: Path) -> None:
    before = digests(root)
    (root / "planning/leaf.py").write_text("LIMIT = 4\n")
    after = digests(root)
    assert {name for name in FILES if before[name] != after[name]} == set(FILES) - {"planning/other.py"}


def test_files_that_import_each_other_have_a_digest(root: Path) -> None:
    before = digests(root)
    (root / "planning/leaf.py").write_text("from routing.top import top\n")
    assert digests(root)["planning/kernel.py"] != before["planning/kernel.py"]


def test_the_same_sources_elsewhere_have_the_same_digest(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = digests(root)
    monkeypatch.setattr(jit, "ROOT", root.parent / "there")
    assert digests(root.parent / "there") == before


def test_numba_keeps_a_kernel_in_the_folder_of_its_sources() -> None:
    assert KernelLocator.from_function(np.linspace, np.__file__) is None, "not a file of ours"
    locator = KernelLocator.from_function(iteration_s, kernels.__file__)
    digest = source_digest(Path(kernels.__file__))
    assert locator is not None
    assert locator.get_cache_path() == f"{numba.config.CACHE_DIR}/kernels-{digest}"
    assert locator.get_source_stamp() == digest
    assert KernelLocator.__qualname__ in numba.config.CACHE_LOCATOR_CLASSES


def test_what_is_used_stays_however_old_and_what_another_process_removes_first_is_no_trouble(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    long_ago_s = time.time() - 2 * KEPT_S
    names = ("kernels-of-another-state", "gone", f"kernels-{source_digest(Path(kernels.__file__))}")
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "compiled").touch()
        os.utime(tmp_path / name, (long_ago_s, long_ago_s))
    locator = KernelLocator.from_function(iteration_s, kernels.__file__)
    assert locator is not None
    looked_at = Path.stat

    def stat(path: Path, **options: Any) -> os.stat_result:
        if path.name == "gone":
            raise FileNotFoundError(path)
        return looked_at(path, **options)

    monkeypatch.setattr(Path, "stat", stat)
    remove_old()
    monkeypatch.undo()
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted(names[1:])
    assert (tmp_path / names[2] / "compiled").exists()


def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "theirs").mkdir()
    os.utime(tmp_path / "theirs", (0.0, 0.0))
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    remove_old()
    assert (tmp_path / "theirs").exists()
