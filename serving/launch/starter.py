"""The packaged files that a user starts from: ``serve.yaml``, cluster files, manifests and examples.

They live at the top of the repository; ``serving/starter`` links to them, and the wheel holds them there as files.
"""

import shutil
from pathlib import Path

STARTER = Path(__file__).resolve().parents[1] / "starter"


def serve_file() -> Path:
    """``serve.yaml`` of this folder, else the packaged one."""
    here = Path("serve.yaml")
    return here if here.exists() else packaged_serve_file()


def packaged_serve_file() -> Path:
    """The ``serve.yaml`` that ships with polyslo."""
    return STARTER / "serve.yaml"


def copy_starter(folder: Path) -> None:
    """Copy the packaged files into ``folder``; raises ValueError, with nothing written, where one is there already."""
    taken = sorted(path.name for path in STARTER.iterdir() if (folder / path.name).exists())
    if taken:
        raise ValueError(f"{folder}: has {', '.join(taken)} already; nothing was written")
    shutil.copytree(STARTER, folder, dirs_exist_ok=True, ignore=_left_out)


def _left_out(folder: str, names: list[str]) -> list[str]:
    """Links that lead nowhere, on a node that has only a part of the repository, and what pip compiled."""
    return [name for name in names if name == "__pycache__" or not Path(folder, name).exists()]
