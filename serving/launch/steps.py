"""What a start is at: one line that changes on a terminal, a line now and then in a file."""

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

LINE_S = 5.0  # between two lines in a file


@contextlib.contextmanager
def steps_shown(console: Console, first: str) -> Iterator[Callable[[str], None]]:
    """Yields what takes the next description."""
    if console.is_terminal:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            shown = progress.add_task(first)
            yield lambda description: progress.update(shown, description=description)
        return
    printed, printed_s = first, time.monotonic()
    console.print(first, markup=False, highlight=False)

    def tell(description: str) -> None:
        nonlocal printed, printed_s
        if description != printed and time.monotonic() - printed_s >= LINE_S:
            printed, printed_s = description, time.monotonic()
            console.print(description, markup=False, highlight=False, soft_wrap=True)

    yield tell
