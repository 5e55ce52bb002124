"""Iterations that need not be formed: all requests decode, all fit, and none is short of time.

Then ``planning.batch.slo`` runs every decode in every iteration, so only the time of each is to be computed. A mirror
of a busy replica spends most of its iterations so.
"""

import math

import numpy as np
from numba import njit

from planning.batch.classes import is_decode
from planning.batch.kv import held_kv_tokens
from planning.deadlines import num_uncomputed_tokens, remaining_tokens
from planning.engine import EngineModel
from planning.lead import formed_ahead_s
from planning.tables import RequestTable
from profiles.kernels import iteration_s

# What bounds a steady run.
DECODES, KV_TOKENS, MOST_STEPS, RATE_S, LINE_S, LINE_TPOT_S, PACE_S = range(7)
SAFETY = 1.0 + 1e-9  # what is closer than that to being late is left to the exact rule


@njit(cache=True)
def _measure(engine: EngineModel, table: RequestTable, now_s: float, found: np.ndarray) -> bool:
    """Fill ``found`` (f8[7]); False where something else than decodes with an objective is there to be served."""
    block_tokens, free = engine.limits["block_tokens"], engine.limits["kv_capacity_tokens"]
    found[DECODES], found[KV_TOKENS], found[MOST_STEPS:] = 0.0, 0.0, math.inf
    for i in range(len(table)):
        row = table[i]
        if num_uncomputed_tokens(row) <= 0:
            continue
        if not is_decode(row) or row["best_effort"] or row["spec_tokens"] > 0:
            return False
        found[DECODES] += 1.0
        found[KV_TOKENS] += row["computed_tokens"] + 1
        free -= held_kv_tokens(row, block_tokens)
        found[MOST_STEPS] = min(found[MOST_STEPS], row["output_cap_tokens"] - row["emitted_tokens"] - 1)
        if row["deadline_s"] < math.inf:
            found[RATE_S] = min(found[RATE_S], (row["deadline_s"] - now_s) / remaining_tokens(row))
            found[MOST_STEPS] = min(found[MOST_STEPS], remaining_tokens(row) - 1)
        if row["ttft_s"] == math.inf:
            found[PACE_S] = min(found[PACE_S], row["tpot_s"])
        elif row["tpot_s"] < math.inf:
            due_s = row["arrival_s"] + row["ttft_s"] + row["emitted_tokens"] * row["tpot_s"]
            found[LINE_S] = min(found[LINE_S], due_s - now_s)
            found[LINE_TPOT_S] = min(found[LINE_TPOT_S], row["tpot_s"])
        elif row["emitted_tokens"] == 0:
            return False
    decodes = found[DECODES]
    if decodes == 0.0 or decodes > min(engine.limits["max_batch_tokens"], engine.limits["max_running"]):
        return False
    spare_tokens = free - engine.limits["kv_capacity_tokens"] % block_tokens - decodes * (2.0 * block_tokens + 1.0)
    found[MOST_STEPS] = min(found[MOST_STEPS], math.floor(spare_tokens / decodes))
    return bool(found[MOST_STEPS] >= 1.0)


@njit(cache=True)
def run_steady(
    engine: EngineModel, table: RequestTable, free_at_s: float, ahead_s: float, until_s: float
) -> tuple[float, float, int, float]:
    """Run on ``table`` (in place) the iterations from ``free_at_s`` that are steady and formed before ``until_s``, the
    first of them ``ahead_s`` before it begins; returns both as of after the last one, how many they are, and how long
    the last one takes."""
    found, steps, last_s = np.empty(7), 0, 0.0
    if not _measure(engine, table, free_at_s, found):
        return free_at_s, ahead_s, steps, last_s
    decodes = found[DECODES]
    while free_at_s - ahead_s < until_s and steps < found[MOST_STEPS]:
        seconds = iteration_s(engine.coef, decodes, found[KV_TOKENS], 0.0, decodes, 0.0)
        least_s = min(found[RATE_S], found[LINE_S], found[PACE_S], engine.limits["max_iteration_s"])
        if seconds <= 0.0 or seconds * SAFETY > least_s:
            break
        free_at_s, last_s = free_at_s + seconds, seconds
        ahead_s = formed_ahead_s(engine.limits, seconds)
        found[KV_TOKENS] += decodes
        found[LINE_S] += found[LINE_TPOT_S] - seconds if found[LINE_S] < math.inf else 0.0
        steps += 1
    for i in range(len(table) if steps else 0):
        row = table[i]
        if num_uncomputed_tokens(row) > 0:
            row["emitted_tokens"] += steps
            row["computed_tokens"] += steps
            row["output_tokens"] = max(row["output_tokens"], row["emitted_tokens"] + 1)
    return free_at_s, ahead_s, steps, last_s
