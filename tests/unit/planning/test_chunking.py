import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planning.chunking import form_prefill_batch, lasting_chunk, prefill_outlook
from planning.limits import make_limits
from planning.tables import request_table
from profiles.kernels import attention_pairs, iteration_s
from tests.planning_cases import COEFS, draw_requests, start_decoding

COEF = np.array([1e-5, 1e-3, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])


def prompts(tokens: list[int]) -> np.ndarray:
    table = request_table(len(tokens))
    table["id"], table["best_effort"], table["prompt_tokens"] = 1 + np.arange(len(tokens)), False, tokens
    table["ttft_s"], table["tpot_s"] = 1.0 + np.arange(len(tokens)), 0.1
    return table


def test_the_papers_example_takes_two_iterations_not_three() -> None:
    """A budget of 1024 and a prompt of 2050 tokens (PolyServe section 4.7)."""
    first_s = np.zeros(1)
    prefill_outlook(COEF, prompts([2050]), 0.0, make_limits(10**5, max_batch_tokens=2048), first_s)
    assert first_s[0] == pytest.approx(2 * 1e-3 + 2050e-5)


def test_prompts_follow_one_another_by_deadline_and_leave() -> None:
    first_s, limits = np.zeros(3), make_limits(10**5, max_batch_tokens=2048)
    table = prompts([1500, 600, 4000])
    table["ttft_s"] = 2.0, 1.0, 3.0
    worst_s = prefill_outlook(COEF, table, 0.0, limits, first_s)
    assert first_s[1] < first_s[0] < first_s[2]
    assert worst_s == pytest.approx(min(1.0 - first_s[1], 2.0 - first_s[0], 3.0 - first_s[2]))
    tokens = np.zeros(3, dtype=np.int32)
    _, mix = form_prefill_batch(COEF, table, 0.0, limits, tokens)
    assert tokens.tolist() == [424, 600, 0]
    assert mix[0] == 1024


def test_a_prompt_larger_than_the_kv_cache_never_runs() -> None:
    first_s = np.zeros(1)
    assert prefill_outlook(COEF, prompts([500]), 0.0, make_limits(400), first_s) == -math.inf
    assert first_s[0] == math.inf


@settings(max_examples=200)
@given(st.integers(0, 2**32 - 1))
def test_a_lasting_chunk_fits_every_iteration_of_the_prefill(seed: int) -> None:
    rng = np.random.default_rng(seed)
    coef, limits = COEFS[int(rng.integers(0, 2))], make_limits(10**6)
    table, row = draw_requests(rng, int(rng.integers(0, 60)), 1), prompts([int(rng.integers(1, 20_000))])[0]
    start_decoding(rng, table)
    table["tpot_s"], table["deadline_s"] = 0.05, np.inf
    chunk, done_s = lasting_chunk(coef, table, row, 1.0, limits)
    if chunk == 0:
        assert done_s == math.inf
        return
    seconds, cached, left, kv = 0.0, 0, int(row["prompt_tokens"]), sum(table["computed_tokens"] + 1)
    step_s = 0.05 if len(table) else limits["max_iteration_s"]
    while left > 0:
        tokens = min(left, chunk)
        batch, sequences = len(table) + tokens, len(table) + 1
        took_s = iteration_s(coef, batch, kv, attention_pairs(tokens, cached), sequences, 0.0)
        assert took_s <= step_s + 1e-9
        seconds, left, cached, kv = seconds + took_s, left - tokens, cached + tokens, kv + len(table)
    assert done_s == pytest.approx(1.0 + seconds)
