"""How many requests CALM lets run at once: its batch size B (Concord section 4.2), found from what is there.

The paper takes B as given. A batch as wide as it may be is no good choice under overload: every iteration of it takes
long, so that few of its requests end by their deadlines.
"""

import math

import numpy as np
from numba import float64, int64, njit

from planning.batch.calm import margin_goodput
from planning.batch.memory import FRAME_ITERATIONS, GROUP_SIZE, ITERATIONS, ROWS
from planning.batch.worth import decode_step_s, prospects
from planning.engine import ENGINE_TYPE, EngineModel
from planning.order import order_of
from planning.tables import TABLE_TYPE, RequestTable
from profiles.compiled_once import compiled_once
from profiles.kernels import attention_pairs, iteration_s

LEAST, STEP = 4, 1.4  # sizes that are compared: the least, and each in the one before
WEIGHT = 0.3  # of the latest frame's size in the logarithmic mean of them
GROWN = 1.5  # times as many requests as when it was last asked: it is asked before the frame ends


@njit(cache=True)
def steady_step_s(engine: EngineModel, rows: RequestTable) -> float:
    """Seconds of a mean iteration of as many requests like ``rows``, where each that ends makes room for another."""
    prompts, outputs, pairs, count = 0.0, 0.0, 0.0, float(len(rows))
    for i in range(len(rows)):
        prompts += rows[i]["prompt_tokens"]
        outputs += rows[i]["output_tokens"]
        pairs += attention_pairs(float(rows[i]["prompt_tokens"]), 0.0)
    begins = count / outputs  # of each of them, in one iteration
    kv_tokens = prompts + 0.5 * outputs
    return float(
        iteration_s(engine.coef, count + begins * prompts, kv_tokens, begins * pairs, count + begins * count, 0.0)
    )


@njit(cache=True)
def best_size(engine: EngineModel, table: RequestTable, now_s: float, order: np.ndarray) -> int:
    """How many of the requests ``order`` (by priority) have most expected goodput per second; 0: all of them.

    Each counts as if it began now: those about to end say nothing of a size that they leave. O(size log size).
    """
    most = min(len(order), int(engine.limits["max_running"]))
    if most <= LEAST:
        return 0
    rows = table[order[:most]]
    for i in range(most):
        rows[i]["output_tokens"] = max(rows[i]["output_tokens"], rows[i]["emitted_tokens"], 1)
        rows[i]["deadline_s"] += now_s - rows[i]["arrival_s"]
        rows[i]["arrival_s"], rows[i]["emitted_tokens"], rows[i]["computed_tokens"] = now_s, 0, 0
        rows[i]["running"], rows[i]["program"] = False, 0
    size, found, best = LEAST, most, -1.0
    while True:
        size = min(size, most)
        begun = rows[:size]
        step_s = steady_step_s(engine, begun)
        goodput = margin_goodput(engine, begun, now_s, step_s, prospects(engine, begun, step_s)).sum()
        if goodput > best:
            found, best = size, goodput
        if size == most:
            return 0 if found == len(order) else found
        size = math.ceil(size * STEP)


@compiled_once(int64(float64[::1], ENGINE_TYPE, TABLE_TYPE, float64))
def group_size(frame: np.ndarray, engine: EngineModel, table: RequestTable, now_s: float) -> int:
    """The size for the coming iteration; 0: as many as the engine may run.

    Found when a frame begins, and when many more requests are there. ``frame`` is that of ``PolicyMemory`` and keeps
    it.
    """
    begins = frame[ITERATIONS] % FRAME_ITERATIONS == 1 or len(table) > GROWN * frame[ROWS]
    if begins and len(table) > 0:
        step_s = decode_step_s(engine, table)
        priorities = margin_goodput(engine, table, now_s, step_s, prospects(engine, table, step_s))
        found = best_size(engine, table, now_s, order_of(-priorities))
        frame[ROWS] = len(table)
        if found == 0:
            frame[GROUP_SIZE] = 0.0
        elif frame[GROUP_SIZE] == 0.0:
            frame[GROUP_SIZE] = found
        else:
            frame[GROUP_SIZE] *= (found / frame[GROUP_SIZE]) ** WEIGHT
    return round(frame[GROUP_SIZE])
