"""When a process looks for cycles of garbage: not while it starts, and seldom through everything while it serves.

A look through all objects takes a tenth of a second where a hundred requests run, and delays a token of each of them.
In a controller of a hundred replicas it takes 10 ms and more, and delays decisions. Messages are decoded into thousands
of objects at once, so the middle generation grows to 20,000 objects, which take 7 ms: it is looked through more often,
and then is small.
"""

import contextlib
import gc
from collections.abc import Iterator

OFTEN = 2  # looks at the youngest generation for each at the middle one; Python's own is 10
SELDOM = 5000  # looks at the middle generation for each at the oldest one; Python's own is 10


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """For a start: what modules make stays, and looking through it again and again takes seconds."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def settle() -> None:
    """What is there now stays, and is not looked through again: Serve does so when a start has ended, which holds up
    whoever is served by then."""
    gc.collect()
    gc.freeze()


def look_seldom() -> None:
    """From now on look through everything seldom, and never through much at once otherwise."""
    gc.set_threshold(gc.get_threshold()[0], OFTEN, SELDOM)


class Garbage:
    """Looks through everything seldom, unless the process has nothing to do."""

    def __init__(self) -> None:
        look_seldom()
        self._is_clean = False

    def note(self, is_idle: bool) -> None:
        """To be called about once a second: collects once whenever work has ended."""
        if is_idle and not self._is_clean:
            gc.collect()
        self._is_clean = is_idle
