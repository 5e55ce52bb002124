"""Baselines that give up on requests that can no longer be in time: those become best effort."""

import math

import numpy as np
from numba import njit

from planning.batch.classes import LATE_DECODE, LATE_PREFILL, classify, is_decode
from planning.batch.composition import KV, SEQUENCES, TOKENS, add_tokens, composition_s
from planning.batch.ordered import run_in_order
from planning.batch.policy import policy
from planning.deadlines import next_token_deadline_s, num_uncomputed_tokens
from planning.engine import EngineModel
from planning.order import order_of
from planning.tables import RequestTable
from profiles.kernels import max_prefill_tokens

NO_PREFILL_S = 0.05  # iterations without a waiting prompt that has an objective are no longer than this


@njit(cache=True)
def shed(engine: EngineModel, table: RequestTable, now_s: float) -> None:
    """Make best effort of every request that can no longer meet its next deadline, however the engine tried."""
    coef, limits = engine.coef, engine.limits
    for i in range(len(table)):
        row = table[i]
        if not row["best_effort"] and num_uncomputed_tokens(row) > 0:
            request_class = classify(coef, limits, row, next_token_deadline_s(row, now_s) - now_s)
            row["best_effort"] = request_class in (LATE_DECODE, LATE_PREFILL)


@njit(cache=True)
def _run_within(
    engine: EngineModel, table: RequestTable, order: np.ndarray, tokens: int, tokens_out: np.ndarray
) -> tuple[float, np.ndarray]:
    """``run_in_order`` with a token budget of this iteration's own (a kernel cannot copy a record: it is put back)."""
    budget = engine.limits["max_batch_tokens"]
    engine.limits["max_batch_tokens"] = max(1, min(tokens, budget))
    seconds, composition = run_in_order(engine, table, order, False, tokens_out)
    engine.limits["max_batch_tokens"] = budget
    return seconds, composition


@njit(cache=True)
def _in_order(keys: np.ndarray, then: np.ndarray) -> np.ndarray:
    """Rows by ``keys``, equal ones by ``then``, equal ones in table order."""
    order = order_of(then)
    return order[order_of(keys[order])]


@policy("sarathi-shed", sheds=True, is_live=False)
def form_decode_first_shed(
    engine: EngineModel, table: RequestTable, now_s: float, tokens_out: np.ndarray
) -> tuple[float, np.ndarray]:
    """Sarathi-Serve that has shed its hopeless requests: they come after everyone else, in the same fixed budget."""
    keys, then = np.zeros(len(table)), np.zeros(len(table))
    for i in range(len(table)):
        row = table[i]
        keys[i] = 0.0 if is_decode(row) else 1.0 if row["running"] else 2.0
        keys[i] += 3.0 if row["best_effort"] else 0.0
        then[i] = row["arrival_s"]
    return run_in_order(engine, table, _in_order(keys, then), False, tokens_out)


@policy("edf-shed", sheds=True, is_live=False)
def form_deadline_sized(
    engine: EngineModel, table: RequestTable, now_s: float, tokens_out: np.ndarray
) -> tuple[float, np.ndarray]:
    """EDF that has shed its hopeless requests, in iterations as long as the tightest running deadline allows, even if
    they take longer than predicted by the slack margin.

    Decodes with slack for one more iteration are parked behind prefills; best effort comes last.
    """
    rows, all_decodes = len(table), np.zeros(5)
    slack_s, keys = np.empty(rows), np.zeros(rows)
    limit_s, prefill_s, cached = engine.limits["max_iteration_s"], math.inf, 0
    stretch = 1.0 + engine.limits["slack_margin"]
    for i in range(rows):
        row = table[i]
        slack_s[i] = next_token_deadline_s(row, now_s) - now_s
        if is_decode(row) and not row["best_effort"]:
            add_tokens(row, 1 + row["spec_tokens"], all_decodes)
            limit_s = min(limit_s, slack_s[i] / stretch)
        elif num_uncomputed_tokens(row) > 0 and not is_decode(row):
            prefill_s = min(prefill_s, slack_s[i] / stretch)
            cached = max(cached, row["computed_tokens"])
    horizon_s = stretch * (limit_s + composition_s(engine.coef, all_decodes)) if prefill_s < math.inf else math.inf
    for i in range(rows):
        if table[i]["best_effort"]:
            keys[i] = 3.0 if is_decode(table[i]) else 4.0
        elif is_decode(table[i]):
            keys[i] = 0.0 if slack_s[i] < horizon_s else 2.0
        else:
            keys[i] = 1.0
    # The first prompt's token must not wait for what is placed behind it; best-effort work must not delay newcomers.
    limit_s = min(limit_s, prefill_s if prefill_s < math.inf else NO_PREFILL_S)
    beside = np.array([all_decodes[TOKENS], all_decodes[KV], 0.0, all_decodes[SEQUENCES], 0.0])
    chunk = max_prefill_tokens(engine.coef, limit_s, beside, cached)
    order = _in_order(keys, slack_s)
    return _run_within(engine, table, order, int(all_decodes[TOKENS] + chunk), tokens_out)
