"""How many requests CALM lets run at once: its batch size B (Concord section 4.2), found from what is there.

The paper takes B as given. A batch as wide as it may be is no good choice under overload: every iteration of it takes
long, so that few of its requests end by their deadlines.
"""

import math

import numpy as np
from numba import float64, int64, njit

from planning.batch.calm import margin_goodput
from planning.batch.memory import FRAME_ITERATIONS, GROUP_SIZE, ITERATIONS, ROWS
from planning.batch.worth import SHORTEST_S, decode_step_s, prospects
from planning.engine import ENGINE_TYPE, EngineModel
from planning.order import order_of
from planning.tables import TABLE_TYPE, RequestTable
from profiles.compiled_once import compiled_once
from profiles.kernels import attention_pairs, iteration_s

LEAST, STEP = 4, 1.4  # sizes that are compared: the least, and each in the one before
WEIGHT = 0.3  # of the latest frame's size in the logarithmic mean of them
GROWN = 1.5  # times as many requests as when it was last asked: it is asked before the frame ends
ENOUGH = 0.95  # of what a small batch would bring, that all who are there bring together: then all run
LATE_WORTH = 0.01  # of a token that comes late: where none can be on time, throughput decides


@njit(cache=True)
def steady_step_s(engine: EngineModel, rows: RequestTable) -> float:
    """Mean seconds between tokens of as many requests like ``rows``, where each that ends makes room for another.

    Prompts count as far as they are to be computed. What exceeds the token budget takes iterations of its own.
    """
    fresh, context, outputs, pairs, count = 0.0, 0.0, 0.0, 0.0, float(len(rows))
    for i in range(len(rows)):
        own = float(rows[i]["prompt_tokens"] - rows[i]["computed_tokens"])
        fresh += own
        context += rows[i]["prompt_tokens"] + 0.5 * rows[i]["output_tokens"]
        outputs += rows[i]["output_tokens"]
        pairs += attention_pairs(own, float(rows[i]["computed_tokens"]))
    begins = count / outputs  # of each of them, per token of the others
    tokens = count + begins * fresh
    step_s = iteration_s(engine.coef, tokens, context, begins * pairs, count * (1.0 + begins), 0.0)
    more = max(0.0, tokens / engine.limits["max_batch_tokens"] - 1.0)
    return max(SHORTEST_S, step_s + more * iteration_s(engine.coef, 1.0, 0.0, 0.0, 1.0, 0.0))


@njit(cache=True)
def begun_now(table: RequestTable, order: np.ndarray, now_s: float) -> RequestTable:
    """The requests as if each began now, alone: those about to end say nothing of a size that they leave.

    Prompts keep what a prefix cache or another replica has computed of them; of those that run it is not known, so they
    get the share that the waiting ones have.
    """
    rows, held, prompts = table[order], 0.0, 0.0
    for i in range(len(rows)):
        row = rows[i]
        row["output_tokens"] = max(row["output_tokens"], row["emitted_tokens"], 1)
        row["deadline_s"] += now_s - row["arrival_s"]
        row["arrival_s"], row["emitted_tokens"], row["program"] = now_s, 0, 0
        row["computed_tokens"] = min(row["computed_tokens"], row["prompt_tokens"] - 1)
        if not row["running"]:
            held, prompts = held + row["computed_tokens"], prompts + row["prompt_tokens"]
    for i in range(len(rows)):
        if rows[i]["running"]:
            rows[i]["computed_tokens"] = int(rows[i]["prompt_tokens"] * held / max(1.0, prompts))
            rows[i]["running"] = False
    return rows


@njit(cache=True)
def expected_goodput(engine: EngineModel, begun: RequestTable, step_s: float, now_s: float) -> tuple[float, float]:
    """Of requests that run together: tokens on time, and what they are worth per second of generating."""
    rests, before = prospects(engine, begun, step_s)
    on_time = margin_goodput(engine, begun, now_s, step_s, (rests, before)) * rests
    late = LATE_WORTH * (begun["prompt_tokens"] + begun["output_tokens"])
    return on_time.sum(), ((on_time + late) / rests).sum()


@njit(cache=True)
def best_size(engine: EngineModel, table: RequestTable, now_s: float, order: np.ndarray) -> int:
    """How many of the requests ``order`` (i8[n], rows by priority) have most expected goodput per second; 0: as many
    as may run.

    All run where that keeps them on time. O(size log size).
    """
    most = min(len(order), int(engine.limits["max_running"]))
    if most <= LEAST:
        return 0
    begun = begun_now(table, order[:most], now_s)
    if most == len(order):
        alone, _ = expected_goodput(engine, begun, steady_step_s(engine, begun[:LEAST]), now_s)
        together, _ = expected_goodput(engine, begun, steady_step_s(engine, begun), now_s)
        if together >= ENOUGH * alone > 0.0:
            return 0
    size, found, best = LEAST, most, 0.0
    while True:
        size = min(size, most)
        some = begun[:size]
        _, per_s = expected_goodput(engine, some, steady_step_s(engine, some), now_s)
        if per_s > best:
            found, best = size, per_s
        if size == most:
            return 0 if found == len(order) else found
        size = math.ceil(size * STEP)


@compiled_once(int64(float64[::1], ENGINE_TYPE, TABLE_TYPE, float64))
def group_size(frame: np.ndarray, engine: EngineModel, table: RequestTable, now_s: float) -> int:
    """The size for the coming iteration; 0: as many as the engine may run.

    Found when a frame begins, and when many more requests are there. ``frame`` (f8[8], in place) is that of
    ``PolicyMemory`` and keeps it.
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
