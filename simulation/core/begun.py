"""How requests were when the iterations in flight began: all that an engine knows, and can report, before they end."""

from typing import NamedTuple

import numpy as np
from numba import njit

from planning.tables import REQUEST, has_begun, stacked

IN_FLIGHT = 2  # iterations that an engine has formed and not ended, at most


class Begun(NamedTuple):
    """The last iterations of every replica, each at its number modulo ``IN_FLIGHT``."""

    tables: np.ndarray  # REQUEST[R, IN_FLIGHT, slots], before it
    counts: np.ndarray  # i8[R, IN_FLIGHT], rows in use
    begin_s: np.ndarray  # f8[R, IN_FLIGHT]
    end_s: np.ndarray  # f8[R, IN_FLIGHT]


def make_begun(replicas: int, slots: int) -> Begun:
    """Nothing has run yet; without ``slots`` nothing is noted."""
    never_s = np.full((2, replicas, IN_FLIGHT), -np.inf)
    tables = np.zeros((replicas, IN_FLIGHT, slots), dtype=REQUEST)
    return Begun(tables, np.zeros((replicas, IN_FLIGHT), dtype=np.int64), never_s[0], never_s[1])


def with_begun_slots(begun: Begun, slots: int) -> Begun:
    """The same with room for more requests each; none stays none."""
    replicas, _, known = begun.tables.shape
    if not known:
        return begun
    larger = make_begun(replicas, slots)
    larger.tables[:, :, :known] = begun.tables
    return begun._replace(tables=larger.tables)


@njit(cache=True)
def note_begun(begun: Begun, r: int, number: int, table: np.ndarray, begin_s: float, seconds: float) -> None:
    """Replica ``r`` forms its iteration ``number`` over these rows, to begin at ``begin_s`` and take ``seconds``."""
    k = number % IN_FLIGHT
    begun.tables[r, k, : len(table)] = table
    begun.counts[r, k], begun.begin_s[r, k], begun.end_s[r, k] = len(table), begin_s, begin_s + seconds


def num_unfinished(begun: Begun, r: int, iterations: int, now_s: float) -> int:
    """Of the ``iterations`` that replica ``r`` has formed, those that have not ended."""
    recent = [begun.end_s[r, number % IN_FLIGHT] for number in range(max(0, iterations - IN_FLIGHT), iterations)]
    return sum(end_s > now_s for end_s in recent)


def settled_rows(begun: Begun, r: int, formed: range, table: np.ndarray, records: np.ndarray) -> np.ndarray:
    """Requests of replica ``r`` (REQUEST[n]) as they were when the first of the iterations ``formed`` began: it runs
    now.

    ``table`` is how they will be once all of these have ended; ``records`` (RECORD[jobs]) say which jobs that ends.
    Those that came meanwhile are as they came, and those that no iteration has begun as they are.
    """
    begins = table["id"][has_begun(table)]
    told = table[:0]
    for number in formed:
        before = begun.tables[r, number % IN_FLIGHT, : begun.counts[r, number % IN_FLIGHT]]
        own = records[before["id"] - 1]
        is_here = np.isin(before["id"], begins) | (own["ended"] & (own["replica"] == r))
        told = stacked(told, before[is_here & ~np.isin(before["id"], told["id"])])
    return stacked(told, table[~np.isin(table["id"], told["id"])])
