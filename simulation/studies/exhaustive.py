"""Exhaustive search over priority mappings: the twin of ``planning.batch.annealing`` for up to seven requests."""

import numpy as np
from numba import njit

from planning.batch.annealing import Jobs, objective

MOST_JOBS = 7


@njit(cache=True)
def best_plan(jobs: Jobs, most: int) -> tuple[np.ndarray, float]:
    """The plan (i8[n]) with the highest objective of all with at most ``most`` jobs in a batch, and that objective.

    Raises ``ValueError`` beyond ``MOST_JOBS`` jobs: there are n to the power of n plans.
    """
    count = len(jobs.outputs)
    if count > MOST_JOBS:
        raise ValueError("exhaustive search takes at most seven jobs")
    plan, sizes, scratch = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64), np.zeros((2, count + 1))
    best, best_value = plan.copy(), -1.0
    for number in range(count**count):
        rest = number
        sizes[:] = 0
        sizes[0] = jobs.busy
        for i in range(count):
            plan[i], rest = rest % count, rest // count
            sizes[plan[i]] += 1
        if sizes.max() <= most:
            value, _met = objective(jobs, plan, scratch)
            if value > best_value:
                best[:], best_value = plan, value
    return best, best_value
