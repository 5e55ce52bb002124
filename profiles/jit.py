"""Where compiled kernels are cached: by what their file and every file it imports say. Imported before any kernel.

numba notices a change of the file that a kernel is in, but not of the kernels it calls in other files: with its default
cache an edited or upgraded package would go on running old code. An edit compiles anew what depends on it and nothing
else; clones and installations of the same sources share what is compiled. ``NUMBA_CACHE_DIR`` overrides the folder.
"""

import contextlib
import functools
import hashlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import numba
from numba.core.caching import UserProvidedCacheLocator

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("profiles", "protocol", "planning", "routing", "controller", "replicas", "simulation")
KEPT_S = 7 * 86400.0  # folders of other states that were not used for so long are removed
IMPORT = re.compile(r"^(?:from ([\w.]+) import (\([^)]*\)|.*)|import ([\w.]+))", re.MULTILINE)


@functools.cache
def imported(path: Path) -> frozenset[Path]:
    """Files of our rooms that this one imports by statements of its top level."""
    found = set()
    for package, names, module in IMPORT.findall(path.read_text()):
        inside = [f"{package}.{name}" for name in re.findall(r"\w+", names)]
        for dotted in (package or module, *inside):
            file = ROOT.joinpath(*dotted.split(".")).with_suffix(".py")
            if dotted.split(".")[0] in ROOMS and file.is_file():
                found.add(file)
    return frozenset(found)


@functools.cache
def source_digest(path: Path) -> str:
    """Digest of a file, of all that it imports, however far, and of numba's version."""
    reached, ahead = {path}, [path]
    while ahead:
        new = imported(ahead.pop()) - reached
        reached |= new
        ahead += new
    digest = hashlib.blake2b(numba.__version__.encode(), digest_size=8)
    for each in sorted(reached):
        digest.update(str(each.relative_to(ROOT)).encode() + each.read_bytes())
    return digest.hexdigest()


class KernelLocator(UserProvidedCacheLocator):
    """One folder per state of a file's sources, named by their digest, which is the stamp too."""

    def __init__(self, py_func: Callable[..., Any], py_file: str) -> None:
        super().__init__(py_func, py_file)
        self._digest = source_digest(Path(py_file).resolve())
        self._cache_path = os.path.join(numba.config.CACHE_DIR, f"{Path(py_file).stem}-{self._digest}")

    def get_source_stamp(self) -> str:
        return self._digest

    def ensure_cache_path(self) -> None:
        super().ensure_cache_path()
        os.utime(self._cache_path)

    @classmethod
    def from_function(cls, py_func: Callable[..., Any], py_file: str) -> Self | None:
        """None for functions that are not of our rooms."""
        file = Path(py_file).resolve()
        is_ours = any(ROOT / room in file.parents for room in ROOMS)
        return super().from_function(py_func, py_file) if is_ours else None


def use_cache_folder() -> None:
    """Have numba ask ``KernelLocator``; its folder, or without a writable one a temporary one."""
    numba.config.CACHE_LOCATOR_CLASSES = (
        f"{KernelLocator.__module__}.{KernelLocator.__name__},InTreeCacheLocator,UserWideCacheLocator"
    )
    if os.environ.get("NUMBA_CACHE_DIR"):
        return
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = Path(os.environ.get("POLYSLO_CACHE") or os.path.join(home, "polyslo")) / "kernels"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        folder = Path(tempfile.gettempdir()) / f"polyslo-kernels-{os.getuid()}"
    numba.config.CACHE_DIR = str(folder)


def remove_old() -> None:
    """Remove folders of other states from our own cache. For a process that has imported all kernels: those it uses are
    as of now by that, however old what is in them."""
    if os.environ.get("NUMBA_CACHE_DIR"):
        return
    with contextlib.suppress(OSError):
        for kernels in list(Path(numba.config.CACHE_DIR).iterdir()):
            with contextlib.suppress(OSError):  # another process was faster
                if time.time() - kernels.stat().st_mtime > KEPT_S:
                    shutil.rmtree(kernels, ignore_errors=True)


use_cache_folder()
