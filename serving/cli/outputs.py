"""Files that a command is to write: refused before it runs where they could not be written."""

import os
from pathlib import Path

import typer

PICTURES = (".png", ".pdf", ".svg")


def check_folders(*paths: Path | None) -> None:
    """Raise a mistake in usage where the folder of a file does not exist, or the file could not be put there."""
    for path in filter(None, paths):
        if not path.parent.is_dir():
            raise typer.BadParameter(f"{path}: its folder does not exist")
        if path.is_dir():
            raise typer.BadParameter(f"{path}: is a folder; name a file")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise typer.BadParameter(f"{path}: cannot be written")


def check_picture(path: Path | None) -> None:
    """As ``check_folders``, and of a kind of picture that matplotlib draws."""
    check_folders(path)
    if path is not None and path.suffix.lower() not in PICTURES:
        raise typer.BadParameter(f"{path}: must end in {', '.join(PICTURES[:-1])} or {PICTURES[-1]}")


def make_folder(path: Path | None) -> None:
    """Make a folder that does not exist; raises a mistake in usage where it cannot be, or could not be written to."""
    if path is None:
        return
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(f"{path}: is no folder, and none can be made ({error.strerror})") from None
    if not os.access(path, os.W_OK):
        raise typer.BadParameter(f"{path}: cannot be written")
