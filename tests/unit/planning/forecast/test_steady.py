"""Steady iterations are those that batch formation would make, one by one."""

import numpy as np
import pytest

from planning.batch.slo import form_batch
from planning.forecast.rollout import run_tokens
from planning.forecast.steady import run_steady
from planning.tables import request_table
from tests.support.planning_cases import Case, draw_case, draw_requests, start_decoding

UNTIL_S = 0.3


def formed(case: Case, table: np.ndarray, until_s: float) -> float:
    """The same by batches formed one after the other (``planning.forecast.rollout.advance``)."""
    now_s, tokens = 0.0, np.zeros(len(table), dtype=np.int32)
    while now_s < until_s:
        seconds, _ = form_batch(case.engine, table, now_s, tokens)
        now_s += seconds
        for i in np.flatnonzero(tokens):
            run_tokens(table[i], int(tokens[i]), 0.0, False)
    return now_s


@pytest.mark.parametrize("seed", range(40))
def test_what_is_steady_runs_as_formed(seed: int) -> None:
    case, rng = draw_case(seed), np.random.default_rng(seed)
    table = draw_requests(rng, int(rng.integers(1, 12)), 1)
    start_decoding(rng, table)
    by_rule = table.copy()
    end_s, *_ = run_steady(case.engine, table, 0.0, 0.0, UNTIL_S)
    assert formed(case, by_rule, end_s) == end_s
    assert np.array_equal(table, by_rule)


def test_a_fleet_of_decodes_in_time_is_steady() -> None:
    case, rng = draw_case(2), np.random.default_rng(0)
    case.limits["kv_capacity_tokens"], case.limits["max_running"] = 200_000, 64
    table = draw_requests(rng, 8, 1)
    start_decoding(rng, table)
    table["deadline_s"], table["ttft_s"], table["tpot_s"] = np.inf, 2.0, 0.1
    table["arrival_s"] = -table["emitted_tokens"] * 0.1 - 1.0
    assert run_steady(case.engine, table, 0.0, 0.0, UNTIL_S)[0] >= UNTIL_S


@pytest.mark.parametrize("field", ["best_effort", "spec_tokens"])
def test_other_work_is_left_to_batch_formation(field: str) -> None:
    case, rng = draw_case(2), np.random.default_rng(0)
    table = draw_requests(rng, 3, 1)
    start_decoding(rng, table)
    table[field][1] = 1
    assert run_steady(case.engine, table, 0.0, 0.0, UNTIL_S)[0] == 0.0
    assert run_steady(case.engine, request_table(0), 0.0, 0.0, UNTIL_S)[0] == 0.0
    prompts = draw_requests(rng, 1, 9)
    assert run_steady(case.engine, prompts, 0.0, 0.0, UNTIL_S)[0] == 0.0
