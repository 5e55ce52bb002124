"""What reports say of an engine's prefix cache."""

from collections.abc import Iterable

import msgspec
import numpy as np

MARK = np.dtype("<u8")  # digest of a prompt up to the end of some block (``routing.prefix_index``)
EVERYTHING = -1


class PrefixNews(msgspec.Struct, frozen=True, array_like=True):
    """What a prefix cache has got and lost since an earlier report."""

    since: int  # the sequence of that report; ``EVERYTHING``: ``stored`` is all that it holds
    stored: bytes = b""  # MARK[n]
    removed: bytes = b""


def packed_marks(marks: Iterable[int]) -> bytes:
    """Marks as reports carry them."""
    return np.fromiter(marks, MARK).tobytes()
