"""The console that every table of the command line is printed on."""

from rich.console import Console

MIN_WIDTH = 108  # characters that the widest table of a status needs
FULL_WIDTH = 1000  # characters where no terminal bounds them: in a file or a pipe nothing is cut off


def table_console(min_width: int = MIN_WIDTH) -> Console:
    """At least ``min_width`` characters wide on a terminal, as wide as its tables elsewhere."""
    terminal = Console()
    return Console(width=max(min_width, terminal.width) if terminal.is_terminal else FULL_WIDTH, highlight=False)
