"""Files that a command is to write: refused before it runs where they could not be written."""

import os
from pathlib import Path

import typer


def check_folders(*paths: Path | None) -> None:
    """Raise a mistake in usage where the folder of a file does not exist, or the file could not be put there."""
    for path in filter(None, paths):
        if not path.parent.is_dir():
            raise typer.BadParameter(f"{path}: its folder does not exist")
        if path.is_dir():
            raise typer.BadParameter(f"{path}: is a folder; name a file")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise typer.BadParameter(f"{path}: cannot be written")
