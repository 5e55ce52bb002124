"""A TPOT without a TTFT counts from the first token."""

import math

import numpy as np
import pytest

from planning.batch.slo import form_batch
from planning.deadlines import begin_lines, next_token_deadline_s
from planning.engine import EngineModel
from planning.forecast.rollout import run_tokens
from planning.limits import make_limits
from planning.tables import request_table

COEF = np.array([1e-3, 0.010, 1e-3, 0.010, 0.0, 0.0, 0.0, 0.0])  # 10 ms + 1 ms per token
LIMITS = make_limits(10**6, max_iteration_s=0.2)


def decodes(count: int, tpot_s: float, first_id: int) -> np.ndarray:
    table = request_table(count)
    table["id"], table["best_effort"], table["tpot_s"] = first_id + np.arange(count), False, tpot_s
    table["prompt_tokens"] = table["computed_tokens"] = 10
    table["emitted_tokens"], table["running"], table["ttft_s"] = 1, True, math.inf
    table["output_tokens"] = table["output_cap_tokens"] = 500
    return table


def test_the_line_begins_at_the_first_token_and_stays() -> None:
    table = np.concatenate([decodes(1, 0.05, 1), decodes(1, math.inf, 2), decodes(1, 0.05, 3)])
    table["emitted_tokens"][2] = 0
    assert begin_lines(table, 4.0) == 1
    assert next_token_deadline_s(table[0], 4.0) == next_token_deadline_s(table[0], 9.0) == pytest.approx(4.05)
    assert np.isinf(table["ttft_s"][1:]).all()
    assert begin_lines(table, 5.0) == 0


def test_where_not_all_fit_into_every_iteration_all_keep_their_pace() -> None:
    """Tight ones alone nearly fill the time; loose ones have to be taken in turn."""
    table, now_s, tokens = np.concatenate([decodes(20, 0.05, 1), decodes(25, 0.2, 100)]), 0.0, np.zeros(45, np.int32)
    while now_s < 8.0:
        begin_lines(table, now_s)
        seconds, _composition = form_batch(EngineModel(COEF, LIMITS), table, now_s, tokens)
        for i in np.flatnonzero(tokens):
            run_tokens(table[i], tokens[i], 0.0, True)
        now_s += seconds
    emitted = table["emitted_tokens"] - 1
    assert emitted[:20].min() >= 8.0 / 0.05 - 2
    assert emitted[20:].min() >= 8.0 / 0.2 - 2
