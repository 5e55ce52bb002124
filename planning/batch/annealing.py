"""Priority mapping by simulated annealing (SLO-aware scheduling, section 4.3): who runs in which batch.

Batches run one after the other. A plan is the batch of each job; jobs of one batch start together, so their order
inside it means nothing. The objective G is the number of jobs that meet their SLO over the sum of their latencies
(equation 2).
"""

import math
from typing import NamedTuple

import numpy as np
from numba import njit

from planning.batch.baselines import form_arrival_order
from planning.batch.ordered import run_by_bid
from planning.batch.policy import policy
from planning.batch.worth import SHORTEST_S
from planning.deadlines import num_uncomputed_tokens, remaining_tokens
from planning.engine import EngineModel
from planning.order import numbers, order_of
from planning.tables import RequestTable
from profiles.kernels import attention_pairs, iteration_s

LEVELS, MOVES_PER_JOB = 40, 12  # temperatures, and moves at each of them
HOTTEST, COLDEST = 0.3, 0.002  # temperatures, as parts of the best objective so far
MULTIPLIER, MODULUS = 48271, 2147483647  # of the random numbers (Park and Miller, 1988)
WINDOW = 40  # waiting requests that are planned, oldest first


class Jobs(NamedTuple):
    """Jobs to be put into batches, and what predicts their latencies (equations 14 to 19 by the engine's model)."""

    prefill_s: np.ndarray  # f8[n, places + 1], until the first token in a batch of so many
    whole_s: np.ndarray  # f8[n, places + 1], until the last one
    outputs: np.ndarray  # i8[n]
    bounds_s: np.ndarray  # f8[n, 3]: TTFT, TPOT, last token; from now
    busy: int  # places of the first batch that are taken
    busy_s: float  # for so long
    places: int  # of a batch, as far as they matter: at most busy + n


@njit(cache=True)
def predicted_jobs(engine: EngineModel, rows: RequestTable, now_s: float, busy: int, busy_s: float) -> Jobs:
    """The requests ``rows`` as jobs, beside ``busy`` running ones that take ``busy_s``."""
    count, coef = len(rows), engine.coef
    places = min(int(engine.limits["max_running"]), busy + count)
    prefill_s, whole_s = np.zeros((count, places + 1)), np.zeros((count, places + 1))
    outputs, bounds_s = np.zeros(count, dtype=np.int64), np.full((count, 3), math.inf)
    for i in range(count):
        row = rows[i]
        todo, outputs[i] = num_uncomputed_tokens(row), remaining_tokens(row)
        pairs = attention_pairs(todo, row["computed_tokens"])
        context = row["computed_tokens"] + todo + 0.5 * outputs[i]
        for size in range(1, places + 1):
            joined = size - busy if size > busy else size
            decode = iteration_s(coef, size, size * context, 0.0, size, 0.0)
            prefill_s[i, size] = iteration_s(coef, joined * todo, 0.0, joined * pairs, joined, 0.0)
            whole_s[i, size] = prefill_s[i, size] + (outputs[i] - 1) * decode
        if not row["best_effort"]:
            age_s = now_s - row["arrival_s"]
            bounds_s[i, 0], bounds_s[i, 1] = row["ttft_s"] - age_s, row["tpot_s"]
            bounds_s[i, 2] = row["deadline_s"] - now_s
    return Jobs(prefill_s, whole_s, outputs, bounds_s, busy, busy_s, places)


@njit(cache=True)
def objective(jobs: Jobs, batch_of: np.ndarray, scratch: np.ndarray) -> tuple[float, int]:
    """G of a plan (equation 2), and how many jobs meet their SLO. ``scratch`` is f8[2, n + 1]."""
    count, sizes, starts = len(batch_of), scratch[0], scratch[1]
    sizes[:] = 0.0
    starts[:] = 0.0
    sizes[0] = jobs.busy
    for i in range(count):
        sizes[batch_of[i]] += 1
    starts[0] = jobs.busy_s
    for i in range(count):
        batch = batch_of[i]
        starts[batch] = max(starts[batch], jobs.whole_s[i, int(sizes[batch])])
    begin_s = 0.0
    for batch in range(count + 1):
        lasts_s = starts[batch]
        starts[batch] = begin_s
        begin_s += lasts_s
    met, latency_s = 0, 0.0
    for i in range(count):
        size, wait_s = int(sizes[batch_of[i]]), starts[batch_of[i]]
        end_s = wait_s + jobs.whole_s[i, size]
        latency_s += end_s
        first_s = wait_s + jobs.prefill_s[i, size]
        pace_s = (end_s - first_s) / max(1, jobs.outputs[i] - 1)
        met += (first_s <= jobs.bounds_s[i, 0]) & (pace_s <= jobs.bounds_s[i, 1]) & (end_s <= jobs.bounds_s[i, 2])
    return met / max(latency_s, SHORTEST_S), met


@njit(cache=True)
def in_sequence(jobs: Jobs, order: np.ndarray, most: int) -> np.ndarray:
    """The plan (i8[n]) that fills batches of ``most`` in this order, the first one where it is not taken."""
    batch_of, free, batch = np.zeros(len(order), dtype=np.int64), most - jobs.busy, 0
    for i in order:
        if free <= 0:
            batch, free = batch + 1, most
        batch_of[i] = batch
        free -= 1
    return batch_of


@njit(cache=True)
def _move(jobs: Jobs, batch_of: np.ndarray, most: int, drawn: int) -> bool:
    """Squeeze a job into the batch before its own, delay it into the next, or exchange two, if that is possible."""
    count = len(batch_of)
    kind, i, other = (drawn >> 7) % 3, (drawn >> 9) % count, (drawn >> 15) % count
    if kind == 2:
        if batch_of[i] == batch_of[other]:
            return False
        batch_of[i], batch_of[other] = batch_of[other], batch_of[i]
        return True
    target = batch_of[i] + (1 if kind else -1)
    if not 0 <= target <= count:
        return False
    taken = jobs.busy if target == 0 else 0
    for k in range(count):
        taken += batch_of[k] == target
    if taken >= most:
        return False
    batch_of[i] = target
    return True


@njit(cache=True)
def anneal(jobs: Jobs, most: int, seed: int) -> tuple[np.ndarray, float]:
    """The best plan found (i8[n]) with at most ``most`` jobs in a batch, and its objective (algorithm 1).

    It begins with the better of arrival order and shortest first. The paper ends there if the latter meets every SLO,
    but other batch sizes may shorten the sum of latencies. At each temperature it goes on from the best plan so far.
    """
    count, scratch = len(jobs.outputs), np.zeros((2, len(jobs.outputs) + 1))
    plan = in_sequence(jobs, np.arange(count), most)
    shortest = order_of(jobs.whole_s[:, min(most, jobs.places)].copy())
    other = in_sequence(jobs, shortest, most)
    value, _met = objective(jobs, plan, scratch)
    other_value, _met = objective(jobs, other, scratch)
    if other_value > value:
        plan, value = other, other_value
    best, best_value, drawn = plan.copy(), value, 1 + seed % (MODULUS - 1)
    cooling, heat = (COLDEST / HOTTEST) ** (1.0 / LEVELS), HOTTEST
    trial = plan.copy()
    for _level in range(LEVELS):
        heat *= cooling
        plan[:], value = best, best_value
        for _ in range(MOVES_PER_JOB * count):
            drawn = drawn * MULTIPLIER % MODULUS
            trial[:] = plan
            if not _move(jobs, trial, most, drawn):
                continue
            tried, _met = objective(jobs, trial, scratch)
            if tried >= value or drawn / MODULUS < math.exp((tried - value) / (heat * max(best_value, 1e-12))):
                plan[:], value = trial, tried
                if value > best_value:
                    best[:], best_value = plan, value
    return best, best_value


@policy("annealing")
def form_annealed(
    engine: EngineModel, table: RequestTable, now_s: float, tokens_out: np.ndarray
) -> tuple[float, np.ndarray]:
    """Those that run, then the newcomers whose batch is the first one of the annealed plan; others wait for the next.

    The oldest ``WINDOW`` requests that wait are planned, best effort after all others. Nobody is interrupted.
    """
    by_arrival = order_of(numbers(table["arrival_s"]))
    by_arrival = by_arrival[order_of(numbers(table["best_effort"][by_arrival]))]
    runs = table["running"][by_arrival]
    running, waiting = by_arrival[runs], by_arrival[~runs]
    order, most, busy = running, int(engine.limits["max_running"]), len(running)
    if busy < most and len(waiting) > 0:
        waiting = waiting[:WINDOW]
        busy_s, seed = 0.0, 0
        if busy > 0:
            rests = predicted_jobs(engine, table[running], now_s, 0, 0.0)
            busy_s = rests.whole_s[:, rests.places].max()
        for i in waiting:
            seed ^= table[i]["id"]
        jobs = predicted_jobs(engine, table[waiting], now_s, busy, busy_s)
        plan, _value = anneal(jobs, most, seed)
        first = 0 if busy > 0 else plan.min()
        order = np.concatenate((running, waiting[plan == first]))
    nobody = np.full(len(table), math.inf)
    seconds, composition = run_by_bid(engine, table, order, (-nobody, nobody), True, tokens_out)
    if seconds > 0.0:
        return seconds, composition
    return form_arrival_order(engine, table, now_s, tokens_out)
