"""When each stage of a program is due, and whether the program can end in time at all.

Concord section 4.1: with ``phi(s)`` the share of a pattern's execution time up to stage ``s``, that stage is due at
``phi(s) * D``. Tool time does not stretch with the deadline, so ``phi`` counts execution time only, and both
sides leave tool time out. Execution times come from token counts and the engines' model: measured ones
would repeat the deadlines that the stages were given.
"""

from typing import NamedTuple

import numpy as np

PRIOR_STAGES = 4.0  # equal ones that a program of an unknown kind is taken to have
PRIOR_WEIGHT = 1.0  # of that, in known graphs that are wholly similar
CAUTION = 0.25  # quantile of the graphs' deadlines that a stage is given: engines use the time that they are left
FOLLOWS = 0.25  # quantile of what follows a stage: engines put late requests last, so a stage is not due too early
FOLLOWS_PACE = 1.5  # times as long as on idle engines that what follows is taken to take
CERTAIN = 0.95  # of all known graphs that must say that a program cannot end in time
LEAST_S = 1e-3  # what a stage is given at least
LEAST_LEFT = 0.25  # of the time left that a stage and later ones share, however long the tools are expected to take


class Outlook(NamedTuple):
    """What the known graphs say of a program in its present stage; each array has one element per graph, the prior's
    the last."""

    weights: np.ndarray  # f8[k], their sum is 1
    earlier_s: np.ndarray  # execution time of the stages before
    this_s: np.ndarray
    later_s: np.ndarray
    later_gaps_s: np.ndarray  # tool time after this stage

    @property
    def as_last(self) -> "Outlook":
        """The same of a stage that is the program's last, as its client says."""
        nothing = np.zeros_like(self.later_s)
        return self._replace(later_s=nothing, later_gaps_s=nothing)

    @property
    def is_end(self) -> bool:
        """Whether nothing follows, by any of them."""
        return not self.later_s.any()

    def quantile(self, values: np.ndarray, share: float) -> float:
        """The least value that this share of the weight does not exceed; sizes of programs are too heavy-tailed for
        means."""
        order = np.argsort(values, kind="stable")
        at = np.searchsorted(np.cumsum(self.weights[order]), share - 1e-9)
        return float(values[order[min(int(at), len(order) - 1)]])

    def within(self, clock: "StageClock") -> "Outlook":
        """The graphs that can end in time, and all where none can: a client sets a deadline by the size of its task."""
        can = self.end_s(clock) <= clock.deadline_s
        if not can.any():
            return self
        kept = np.where(can, self.weights, 0.0)
        return self._replace(weights=kept / kept.sum())

    def chance_in_time(self, clock: "StageClock") -> float:
        """Weight (0 to 1) of the graphs that can end in time from now on, in that of those that could from the
        beginning, both with calls ``FOLLOWS_PACE`` as long as on idle engines: time that a program has lost says
        nothing of its size."""
        rest_s = FOLLOWS_PACE * (self.this_s + self.later_s) + self.later_gaps_s
        could = FOLLOWS_PACE * self.earlier_s + clock.gaps_s + rest_s <= clock.deadline_s
        can = clock.now_s + rest_s <= clock.deadline_s
        possible = float(self.weights[could].sum())
        return float(self.weights[could & can].sum()) / possible if possible > 0.0 else 0.0

    def end_s(self, clock: "StageClock") -> np.ndarray:
        """When a program like each graph would end on idle engines, since its first arrival (f8[k])."""
        ends: np.ndarray = clock.now_s + self.this_s + self.later_s + self.later_gaps_s
        return ends


class StageClock(NamedTuple):
    """Where a program stands, in seconds since its first arrival."""

    deadline_s: float
    now_s: float
    gaps_s: float  # tool time so far


def outlook(similarity: np.ndarray, execution: np.ndarray, gaps_s: np.ndarray, stage: int) -> Outlook:
    """The outlook from stage ``stage`` (from 0) on, of known graphs (f8[k]) and the prior.

    The prior counts like one graph that is wholly similar. It has ``PRIOR_STAGES`` equal stages, or one more than this,
    which take next to no time on an idle engine.

    Args:
        execution: execution time of each stage of each graph (f8[k, S], S above ``stage``).
        gaps_s: tool time before each of them (f8[k, S]).
    """
    later = max(0.0, PRIOR_STAGES - stage - 1.0)
    prior = (PRIOR_WEIGHT, stage * LEAST_S, LEAST_S, later * LEAST_S, 0.0)
    known = (
        similarity,
        execution[:, :stage].sum(axis=1),
        execution[:, stage],
        execution[:, stage + 1 :].sum(axis=1),
        gaps_s[:, stage + 1 :].sum(axis=1),
    )
    columns = [np.append(column, own) for column, own in zip(known, prior, strict=True)]
    return Outlook(columns[0] / columns[0].sum(), *columns[1:])


def accumulated_share(seen: Outlook) -> np.ndarray:
    """``phi`` (f8[k]): the share of a graph's execution time up to and with the present stage."""
    upto_s = seen.earlier_s + np.maximum(seen.this_s, LEAST_S)
    share: np.ndarray = upto_s / (upto_s + seen.later_s)
    return share


def remaining_share(seen: Outlook) -> np.ndarray:
    """The share of the present stage in the execution time that is left, itself included (f8[k])."""
    this_s = np.maximum(seen.this_s, LEAST_S)
    share: np.ndarray = this_s / (this_s + seen.later_s)
    return share


def stage_deadline_s(seen: Outlook, clock: StageClock, slowest_s: float = 0.0) -> float:
    """When the stage is due, since the program's first arrival; at least ``LEAST_S`` after now.

    It has until ``phi(s) * D``. A program that is behind shares out what is left instead: past lateness is no stage's
    alone. Siblings of a slow sub-request, which is due at ``slowest_s``, need not end before it and yield.

    Args:
        seen: the graphs that count (``Outlook.within``).
    """
    if clock.deadline_s == np.inf:
        return np.inf
    left_s = clock.deadline_s - clock.now_s
    stretch_s = clock.deadline_s - clock.gaps_s - seen.later_gaps_s
    accumulated_s = clock.gaps_s + accumulated_share(seen) * stretch_s
    own_s = remaining_share(seen) * np.maximum(left_s - seen.later_gaps_s, LEAST_LEFT * left_s)
    due_s = max(seen.quantile(np.maximum(accumulated_s, clock.now_s + own_s), CAUTION), slowest_s)
    return max(min(due_s, clock.deadline_s), clock.now_s + LEAST_S)


def latest_end_s(seen: Outlook, clock: StageClock) -> float:
    """When the stage must end at the latest, since the program's first arrival: what follows then takes not much longer
    than on idle engines. Not after the program's deadline; where that is tight, ``stage_deadline_s`` may say more (its
    arguments are the same)."""
    if clock.deadline_s == np.inf:
        return np.inf
    follows_s = seen.quantile(FOLLOWS_PACE * seen.later_s + seen.later_gaps_s, FOLLOWS)
    return max(clock.deadline_s - follows_s, clock.now_s + LEAST_S)


def is_beyond_all_known(known_s: np.ndarray, left_s: float) -> bool:
    """Whether each known program (``known_s`` as of ``can_end_in_time``) takes longer than that, so that the prior,
    which takes next to no time, would promise alone what none of them could keep."""
    return len(known_s) > 0 and bool((known_s > left_s).all())


def can_end_in_time(known_s: np.ndarray, left_s: float) -> bool:
    """Whether a program of this kind can end within ``left_s`` seconds on idle engines: the prior, or a known graph,
    unless those that cannot are ``CERTAIN`` of all. The graphs nearest to a first sub-request do not decide it: a
    client sets a deadline by the size of its task, of which that one says little. Tools may take any time.

    Args:
        known_s: what the calls of each known graph take on idle engines (f8[k]).
    """
    cannot = int(np.count_nonzero(known_s > left_s))
    return left_s > 0.0 and cannot < CERTAIN * (len(known_s) + PRIOR_WEIGHT)
