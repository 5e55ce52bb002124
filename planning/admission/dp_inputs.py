"""What the DP is asked about a replica, and its answer.

Accepting is proposed here by budgets between deadlines; whether it holds is for a forecast to say
(``planning.admission.search``).
"""

import math

import numpy as np
from numba import boolean, float64, int64, njit

from planning.admission.demand import DEMAND, fill_demand, longest_iteration_s, prefill_cost_tokens
from planning.admission.dp import ITEM, choose_set
from planning.batch.kv import held_kv_tokens
from planning.deadlines import effective_tpot_s, next_token_deadline_s, num_uncomputed_tokens, remaining_tokens
from planning.engine import ENGINE_TYPE, EngineModel
from planning.limits import usable_kv_tokens
from planning.order import distinct, numbers, order_of, place_in
from planning.tables import TABLE_TYPE, TPOT_LEVEL, RequestTable
from profiles.compiled_once import compiled_once
from profiles.kernels import Coefficients

PROMISED, OPEN, CHOSEN, REFUSED = range(4)  # what a row of the table is to the choice
KV_UNITS = 16
VALUE_UNITS = 32


@njit(cache=True)
def _levels(table: RequestTable, options: np.ndarray, start_s: float, most: int) -> tuple[np.ndarray, np.ndarray]:
    """At most ``most`` TPOT levels of the open requests and the level of each; a level stands for its tightest."""
    pace_s = np.empty(len(options))
    for j in range(len(options)):
        pace_s[j] = min(effective_tpot_s(table[options[j]], start_s), 1e6)
    paces_s = distinct(pace_s)
    stride = math.ceil(len(paces_s) / most)
    levels = np.zeros(math.ceil(len(paces_s) / stride), dtype=TPOT_LEVEL)
    level_of, count = np.empty(len(options), dtype=np.int64), np.zeros(len(levels))
    for j in range(len(options)):
        level_of[j] = place_in(paces_s, pace_s[j]) // stride
        level, row = levels[level_of[j]], table[options[j]]
        level["kv_tokens"] += row["prompt_tokens"] + row["emitted_tokens"] + 0.5 * remaining_tokens(row)
        count[level_of[j]] += 1
    for pos in range(len(levels)):
        levels[pos]["tpot_s"] = paces_s[pos * stride]
        levels[pos]["kv_tokens"] /= count[pos]
    return levels, level_of


@njit(cache=True)
def _free_kv_tokens(table: RequestTable, status: np.ndarray, limits: np.void) -> float:
    """KV tokens beside what promised requests hold now or have asked for with their prompts."""
    free = usable_kv_tokens(limits)
    for i in range(len(table)):
        if status[i] == PROMISED and not table[i]["best_effort"]:
            waits = 0 if table[i]["running"] else max(0, num_uncomputed_tokens(table[i]))
            free -= held_kv_tokens(table[i], limits["block_tokens"]) + waits
    return free


@njit(cache=True)
def _are_equal(values: np.ndarray) -> bool:
    are_equal = True
    for value in values:
        are_equal &= value == values[0]
    return are_equal


@njit(cache=True)
def _items(
    coef: Coefficients,
    table: RequestTable,
    rows: np.ndarray,
    status: np.ndarray,
    level_of: np.ndarray,
    unit_tokens: float,
) -> np.ndarray:
    """The DP's items for ``rows``, which are sorted by prefill deadline."""
    items, options = np.zeros(len(rows), dtype=ITEM), np.flatnonzero(status == OPEN)
    values = numbers(table["value"][options])
    are_equal, total = _are_equal(values), values.sum()
    for pos in range(len(rows)):
        row, item = table[rows[pos]], items[pos]
        item["cost_tokens"] = prefill_cost_tokens(coef, row)
        item["is_forced"] = status[rows[pos]] == PROMISED
        if item["is_forced"]:
            continue
        j = place_in(options, rows[pos])
        item["level"] = level_of[j]
        if unit_tokens > 0.0:
            peak_tokens = row["prompt_tokens"] + row["emitted_tokens"] + remaining_tokens(row)
            item["kv_units"] = math.ceil(0.5 * (row["prompt_tokens"] + peak_tokens) / unit_tokens)
        if not are_equal:
            item["value_units"] = max(1, round(VALUE_UNITS * max(0.0, row["value"]) / total))
    return items


@compiled_once(boolean[::1](ENGINE_TYPE, TABLE_TYPE, int64[::1], int64[::1], float64))
def propose(
    engine: EngineModel, table: RequestTable, status: np.ndarray, options: np.ndarray, start_s: float
) -> np.ndarray:
    """The DP's choice among ``options`` (sorted rows of ``table``): bool for each."""
    are_equal = _are_equal(numbers(table["value"][options]))
    is_small = len(options) <= 16 and are_equal
    levels, level_of = _levels(table, options, start_s, 4 if is_small else 2)
    most_units = KV_UNITS if are_equal else KV_UNITS // 2
    is_item = status == OPEN
    for i in range(len(table)):
        is_item[i] |= status[i] == PROMISED and not table[i]["best_effort"] and num_uncomputed_tokens(table[i]) > 1
    rows = np.flatnonzero(is_item)
    due_s = np.empty(len(rows))
    longest = 0.0
    for pos in range(len(rows)):
        row = table[rows[pos]]
        due_s[pos] = min(next_token_deadline_s(row, start_s), start_s + 1e6)
        if status[rows[pos]] == OPEN:
            longest = max(longest, min(effective_tpot_s(row, start_s), 1.0) * remaining_tokens(row))
    order = order_of(due_s)
    rows, checkpoints_s = rows[order], np.empty(len(rows) + 2)
    for pos in range(len(rows)):
        checkpoints_s[pos] = max(due_s[order[pos]], start_s)
    checkpoints_s[-2], checkpoints_s[-1] = checkpoints_s[-3] + longest * 0.25, checkpoints_s[-3] + longest * 0.5
    spans = np.zeros(len(checkpoints_s), dtype=DEMAND)
    fill_demand(engine.coef, table[status == PROMISED], start_s, checkpoints_s, spans)
    free_tokens, asked_tokens = _free_kv_tokens(table, status, engine.limits), 0.0
    for i in options:
        asked_tokens += table[i]["prompt_tokens"] + table[i]["emitted_tokens"] + remaining_tokens(table[i])
    unit_tokens = max(1.0, free_tokens / most_units) if asked_tokens > free_tokens else 0.0
    items = _items(engine.coef, table, rows, status, level_of, unit_tokens)
    units = most_units if unit_tokens > 0.0 else 0
    bits = choose_set(engine.coef, items, spans, levels, longest_iteration_s(engine), units)
    picked, bit = np.zeros(len(options), dtype=np.bool_), 0
    for pos in range(len(rows)):
        if status[rows[pos]] == OPEN:
            picked[place_in(options, rows[pos])] = (bits >> bit) & 1
            bit += 1
    return picked
