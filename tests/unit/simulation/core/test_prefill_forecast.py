import math

import numpy as np
import pytest

from planning.batch.prefill_only import form_prefill_batch
from planning.engine import EngineModel
from planning.limits import make_limits
from planning.tables import request_table
from simulation.core.prefill_forecast import forecast_prefills

COEF = np.array([1e-5, 1e-3, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])


def prompts(tokens: list[int]) -> np.ndarray:
    table = request_table(len(tokens))
    table["id"], table["best_effort"], table["prompt_tokens"] = 1 + np.arange(len(tokens)), False, tokens
    table["ttft_s"], table["tpot_s"] = 1.0 + np.arange(len(tokens)), 0.1
    return table


def test_the_papers_example_takes_two_iterations_not_three() -> None:
    """A budget of 1024 and a prompt of 2050 tokens (PolyServe section 4.7)."""
    first_s = np.zeros(1)
    forecast_prefills(EngineModel(COEF, make_limits(10**5, max_batch_tokens=2048)), prompts([2050]), 0.0, first_s)
    assert first_s[0] == pytest.approx(2 * 1e-3 + 2050e-5)


def test_prompts_follow_one_another_by_deadline_and_leave() -> None:
    first_s, limits = np.zeros(3), make_limits(10**5, max_batch_tokens=2048)
    table = prompts([1500, 600, 4000])
    table["ttft_s"] = 2.0, 1.0, 3.0
    worst_s = forecast_prefills(EngineModel(COEF, limits), table, 0.0, first_s)
    assert first_s[1] < first_s[0] < first_s[2]
    assert worst_s == pytest.approx(min(1.0 - first_s[1], 2.0 - first_s[0], 3.0 - first_s[2]))
    tokens = np.zeros(3, dtype=np.int32)
    _, mix = form_prefill_batch(EngineModel(COEF, limits), table, 0.0, tokens)
    assert tokens.tolist() == [424, 600, 0]
    assert mix[0] == 1024


def test_a_prompt_larger_than_the_kv_cache_never_runs() -> None:
    first_s = np.zeros(1)
    assert forecast_prefills(EngineModel(COEF, make_limits(400)), prompts([500]), 0.0, first_s) == -math.inf
    assert first_s[0] == math.inf
