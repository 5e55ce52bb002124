"""A replica that only prefills: dynamic chunks, and a forecast that forms the same batches as the engine."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planning.batch.prefill_only import chunk_budget_tokens, chunk_within
from planning.batch.registry import batch_policy
from planning.deadlines import next_token_deadline_s, num_uncomputed_tokens
from planning.engine import EngineModel
from planning.forecast.rollout import FORECAST, forecast_requests, mark_finished, run_tokens
from planning.limits import make_limits
from planning.tables import request_table
from profiles.store import load_profile
from tests.support.examples import examples

COEF = load_profile("h200_sxm__llama-3.1-8b").coefficients
LIMITS = make_limits(kv_capacity_tokens=10**6)


@pytest.mark.parametrize(
    ("left", "batch", "chunk"),
    [
        (2050, 0, 1024),
        (1026, 0, 1026),
        (2047, 0, 2047),
        (2048, 0, 1024),
        (1, 1023, 1),
        (500, 1024, 0),
        (3000, 1000, 24),
    ],
)
def test_the_last_chunk_is_merged_below_twice_the_budget(left: int, batch: int, chunk: int) -> None:
    assert chunk_within(left, batch, 1024) == chunk


def queue(rng: np.random.Generator) -> np.ndarray:
    """Prompts whose deadlines are near to what all of them need; some best effort, some late already."""
    table = request_table(int(rng.integers(2, 16)))
    table["id"], table["best_effort"] = 1 + np.arange(len(table)), rng.random(len(table)) < 0.15
    table["prompt_tokens"] = rng.integers(100, 6_000, len(table))
    table["output_tokens"] = table["output_cap_tokens"] = 1
    all_s = 2.2e-5 * table["prompt_tokens"].sum()
    table["ttft_s"] = rng.uniform(0.1, 1.3, len(table)) * all_s
    table["tpot_s"] = 1.0
    return table


def first_tokens_s(table: np.ndarray) -> np.ndarray:
    """When the engine's own batches bring each first token (f8[rows])."""
    table, form, now_s = table.copy(), batch_policy("slo").form, 0.0
    tokens, first_s = np.zeros(len(table), dtype=np.int32), np.full(len(table), math.inf)
    while (seconds := form(EngineModel(COEF, LIMITS), table, now_s, tokens)[0]) > 0.0:
        now_s += seconds
        for i in np.flatnonzero(tokens):
            if run_tokens(table[i], tokens[i], 0.0, True):
                first_s[i] = now_s
                mark_finished(table[i])
    return first_s


@examples(300)
@given(st.integers(0, 2**32 - 1))
def test_what_the_forecast_has_on_time_the_engine_ends_on_time(seed: int) -> None:
    table = queue(np.random.default_rng(seed))
    forecast = np.zeros(len(table), dtype=FORECAST)
    forecast["unattainable"] = True  # so that the forecast goes on, whoever is late
    forecast_requests(EngineModel(COEF, LIMITS), table, 0.0, -math.inf, forecast)
    first_s = first_tokens_s(table)
    assert np.isfinite(first_s).all()
    due_s = np.array([next_token_deadline_s(row, 0.0) for row in table])
    promised = ~table["best_effort"] & (forecast["margin_s"] >= 0.0)
    assert (first_s[promised] <= due_s[promised] + 1e-9).all()


def test_chunks_are_dynamic_only_where_everything_ends_with_its_first_token() -> None:
    table = request_table(2)
    table["prompt_tokens"], table["output_tokens"], table["output_cap_tokens"] = 500, 1, (1, 40)
    assert chunk_budget_tokens(table, LIMITS) == LIMITS["max_batch_tokens"]
    assert chunk_budget_tokens(table[:1], LIMITS) == LIMITS["max_batch_tokens"] // 2
    table[1]["computed_tokens"] = 500  # nothing left to do
    assert num_uncomputed_tokens(table[1]) == 0
    assert chunk_budget_tokens(table, LIMITS) == LIMITS["max_batch_tokens"] // 2
