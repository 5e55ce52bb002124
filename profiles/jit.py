"""Where compiled kernels are cached: one folder per state of their sources. Imported before any kernel.

numba notices a change of the file that a kernel is in, but not of the kernels it calls in other files: with its default
cache an edited or upgraded package would go on running old code. ``NUMBA_CACHE_DIR`` overrides the folder.
"""

import hashlib
import os
import shutil
import tempfile
import time
from pathlib import Path

import numba

ROOMS = ("profiles", "protocol", "planning", "routing", "controller", "replicas", "simulation")
KEPT_S = 7 * 86400.0  # folders of other states that were not used for so long are removed


def source_digest(root: Path) -> str:
    """Digest of every source file with kernels in it, and of numba's version."""
    digest = hashlib.blake2b(numba.__version__.encode(), digest_size=8)
    for room in ROOMS:
        for path in sorted((root / room).rglob("*.py")):
            text = path.read_bytes()
            if b"njit" in text:
                digest.update(path.name.encode() + text)
    return digest.hexdigest()


def use_cache_folder() -> None:
    """Point numba at the folder of the present sources; without a writable one, at a temporary one."""
    if os.environ.get("NUMBA_CACHE_DIR"):
        return
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    base = Path(os.environ.get("POLYSLO_CACHE") or os.path.join(home, "polyslo")) / "kernels"
    digest = source_digest(Path(__file__).resolve().parent.parent)
    try:
        (base / digest).mkdir(parents=True, exist_ok=True)
        os.utime(base / digest)
        _remove_old(base)
    except OSError:
        base = Path(tempfile.gettempdir()) / f"polyslo-kernels-{os.getuid()}"
    numba.config.CACHE_DIR = str(base / digest)


def _remove_old(base: Path) -> None:
    for folder in base.iterdir():
        if time.time() - folder.stat().st_mtime > KEPT_S:
            shutil.rmtree(folder, ignore_errors=True)


use_cache_folder()
