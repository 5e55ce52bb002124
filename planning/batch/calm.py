"""Concord's batch policy CALM: the group of requests that promises most goodput for its time (algorithm 4.1)."""

import math

import numpy as np
from numba import njit

from planning.batch.fair import FAIRNESS, blend
from planning.batch.memory import FRAME_ITERATIONS
from planning.batch.ordered import run_by_bid
from planning.batch.policy import policy
from planning.batch.tempo import interruption_costs
from planning.batch.worth import chances_in_time, decode_step_s, first_s, prospects, token_goodput
from planning.engine import EngineModel
from planning.limits import most_sequences
from planning.order import integers, numbers, order_of, order_of_integers
from planning.tables import RequestTable


@njit(cache=True)
def margin_goodput(
    engine: EngineModel, table: RequestTable, now_s: float, step_s: float, expected: tuple[np.ndarray, np.ndarray]
) -> np.ndarray:
    """Expected token goodput per second of generating (f8[rows], Concord equation 4.1).

    The paper counts a request whose upper bound fits; here it counts by its chance, so lengths need not be known well.

    ``expected`` is what ``planning.batch.worth.prospects`` says.
    """
    found, (rests, before) = np.empty(len(table)), expected
    chances = chances_in_time(engine, table, now_s, step_s)
    for i in range(len(table)):
        next_s = first_s(engine, table[i], step_s)
        found[i] = token_goodput(table[i], now_s, next_s, rests[i], before[i], chances[i]) / rests[i]
    return found


@njit(cache=True)
def best_group(priorities: np.ndarray, prompt_tokens: np.ndarray, places: int, cutoff: float) -> np.ndarray:
    """Which requests form the batch (bool[rows]): of those that come near the ``places``-th highest priority, the
    ``places`` neighbours by prompt length whose priorities sum up highest.

    ``cutoff`` (0 to 1) is the least priority of a candidate as part of that one. O(n log n).
    """
    chosen, rows = np.zeros(len(priorities), dtype=np.bool_), len(priorities)
    if rows <= places:
        chosen[:] = True
        return chosen
    last = priorities[order_of(priorities)[rows - places]]
    least = cutoff * last if last > 0.0 else last
    candidates = np.flatnonzero(priorities >= least)
    lengths = integers(prompt_tokens[candidates])
    # Equal lengths by priority, so that a cutoff of 1 keeps the highest priorities.
    by_priority = order_of(-priorities[candidates])
    if cutoff >= 1.0:
        chosen[candidates[by_priority[:places]]] = True
        return chosen
    by_length = candidates[by_priority[order_of_integers(lengths[by_priority])]]
    total = best = priorities[by_length[:places]].sum()
    first = 0
    for end in range(places, len(by_length)):
        total += priorities[by_length[end]] - priorities[by_length[end - places]]
        if total > best * (1.0 + 1e-12):
            best, first = total, end - places + 1
    chosen[by_length[first : first + places]] = True
    return chosen


@policy("calm", remembers=True, adapts=("group_cutoff", "group_size"), options={"fairness": FAIRNESS})
def form_grouped_margin_goodput(
    engine: EngineModel, table: RequestTable, now_s: float, tokens_out: np.ndarray
) -> tuple[float, np.ndarray]:
    """CALM: the best group first, then the others by margin goodput; ``fairness`` blended in.

    A newcomer takes a place at the end of a frame if its priority exceeds ``planning.batch.tempo.interruption_costs``.
    """
    step_s = decode_step_s(engine, table)
    expected = prospects(engine, table, step_s)
    priorities = margin_goodput(engine, table, now_s, step_s, expected)
    costs = interruption_costs(engine, table, priorities, expected[0], FRAME_ITERATIONS)
    blend(table, engine.limits["fairness"], priorities, costs)
    prompts = table["prompt_tokens"].copy()
    group = best_group(priorities, prompts, most_sequences(engine.limits), engine.limits["group_cutoff"])
    by_arrival = order_of(numbers(table["arrival_s"]))
    order = by_arrival[order_of(-priorities[by_arrival])]
    order = np.concatenate((order[group[order]], order[~group[order]]))
    costs[group] = math.inf
    return run_by_bid(engine, table, order, (priorities, costs), True, tokens_out)
