"""Files that a command is to write: refused before it runs where they could not be written."""

from pathlib import Path

import typer


def check_folders(*paths: Path | None) -> None:
    """Raise a mistake in usage where the folder of a file does not exist."""
    for path in paths:
        if path is not None and not path.parent.is_dir():
            raise typer.BadParameter(f"{path}: its folder does not exist")
