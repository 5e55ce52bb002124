"""How many examples hypothesis tries of a kernel."""

import hypothesis
from numba import config

INTERPRETED_SHARE, LEAST = 5, 20


def examples(count: int) -> hypothesis.settings:
    """``count`` of them; a fifth without the compiler, which shows other faults: indices out of bounds, overflows."""
    if config.DISABLE_JIT:
        count = min(count, max(LEAST, count // INTERPRETED_SHARE))
    return hypothesis.settings(max_examples=count)
