"""The demand bound: whether programs can all end in time, by the work that they ask for until each deadline.

Processor-demand criterion (Baruah, Rosier and Howell 1990): earliest deadline first keeps all deadlines exactly where,
until each of them, no more work is due than can be served. Work is in replica-seconds of a busy replica.
"""

import numpy as np

BUSY_PACE = 2.0  # times as long as on an idle engine that a call takes on a busy one that it need not wait for
PRIOR_STRETCH, PRIOR_PROGRAMS = 3.0, 4.0  # times as long as on idle engines that calls may take, and what that weighs
MOST_STRETCH = 30.0  # times, that one program counts for at most: who has a day for a minute's work is no measure
LEAST_SHARE = 0.1  # of the capacity, that is usable however little time calls have


def demand(due_s: np.ndarray, work_s: np.ndarray, now_s: float, rate: float, since_s: float = -np.inf) -> float:
    """Work due until a deadline, in what is served until then; of the deadline where that is most.

    Args:
        due_s: deadlines of programs (f8[n]); those that are over are not counted.
        work_s: replica-seconds left of each (f8[n]).
        rate: replica-seconds served in a second.
        since_s: earlier deadlines are not asked about: a program adds nothing to what is due before its own.
    """
    left_s = due_s - now_s
    open_ = np.flatnonzero(left_s > 0.0)
    if not len(open_) or rate <= 0.0:
        return np.inf if len(work_s) and rate <= 0.0 else 0.0
    order = open_[np.argsort(left_s[open_], kind="stable")]
    loads = np.cumsum(work_s[order]) / (rate * left_s[order])
    return float(loads.max(where=due_s[order] >= since_s, initial=0.0))


def overrun_s(left_s: np.ndarray, work_s: np.ndarray, rate: float, since_s: float = 0.0) -> float:
    """How long after a deadline the work due until then would be served; of the deadline where that is longest, but
    none counts when the last is over.

    Args:
        left_s: until the deadlines of programs, above 0 (f8[n], n above 0).
        work_s: replica-seconds left of each.
        rate: replica-seconds served in a second, above 0.
        since_s: as in ``demand``.
    """
    order = np.argsort(left_s, kind="stable")
    over_s = np.cumsum(work_s[order]) / rate - left_s[order]
    return float(min(over_s.max(where=left_s[order] >= since_s, initial=0.0), left_s.max()))


def reachable_work_s(work_s: np.ndarray, takes_s: np.ndarray, left_s: np.ndarray) -> np.ndarray:
    """What programs can ask for until their deadlines (f8[n]): the part of their work that then can be done at all.

    Calls come one after the other, with tools between. One that takes longer than it has left asks for a part.

    Args:
        takes_s: what the rest of each takes on an idle engine, tools included.
        left_s: until each deadline, above 0.
    """
    parts = np.minimum(1.0, left_s / np.maximum(takes_s, 1e-9))
    reachable: np.ndarray = np.minimum(work_s * parts, left_s)
    return reachable


def evicted_share(context_tokens: float, kv_tokens: float) -> float:
    """Part of the conversations that the KV cache does not hold when their next call comes."""
    return max(0.0, 1.0 - kv_tokens / context_tokens) if context_tokens > 0.0 else 0.0


def stretch(left_s: np.ndarray, idle_s: np.ndarray, gaps_s: np.ndarray) -> float:
    """How many times as long as on idle engines the calls that are left may take, of all programs together and a prior.

    One program's figure says little, since how many calls follow is hardly known; their sum says more.

    Args:
        left_s: until each deadline (f8[n]).
        idle_s: what the calls that are left take on idle engines; tool time not included.
        gaps_s: tool time that is left.
    """
    prior_s = PRIOR_PROGRAMS * float(idle_s.mean()) if len(idle_s) else 0.0
    total_s = float(idle_s.sum()) + prior_s
    may_take_s = float(np.minimum(left_s - gaps_s, MOST_STRETCH * idle_s).sum())
    return (may_take_s + PRIOR_STRETCH * prior_s) / total_s if total_s > 0.0 else PRIOR_STRETCH


def usable_share(stretched: float, side_by_side: float) -> float:
    """Part of the capacity that may be due, where calls may take so many times as long as on an idle engine.

    With processor sharing, a load ``u`` makes a call ``1 / (1 - u)`` times as long as alone; alone on a busy replica it
    takes ``BUSY_PACE`` times as long as on an idle one. All of it is usable where calls may take as long as if those of
    all programs always ran together.

    Args:
        side_by_side: programs per replica.
    """
    if stretched >= side_by_side:
        return 1.0
    return max(LEAST_SHARE, 1.0 - BUSY_PACE / stretched) if stretched > 0.0 else LEAST_SHARE
