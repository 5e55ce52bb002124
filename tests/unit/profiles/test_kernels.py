"""The kernels against the formula of their docstring, written out slowly."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiles import kernels
from tests.support.planted_profile import COEFFICIENTS

amounts = st.floats(0, 1e5)


@given(st.floats(1, 1e4), amounts, amounts, st.floats(1, 500), st.integers(0, 8))
def test_an_iteration_is_the_larger_line_plus_the_other_terms(
    tokens: float, kv_tokens: float, pairs: float, sequences: float, spec_steps: int
) -> None:
    coef = COEFFICIENTS.copy()
    coef[kernels.K_SPEC] = 1e-4
    k1_1, b_1, k1_2, b_2, k_kv, k_att, k_seq, k_spec = coef
    lines = max(k1_1 * tokens + b_1, k1_2 * tokens + b_2)
    expected = lines + k_kv * kv_tokens + k_att * pairs + k_seq * sequences + k_spec * spec_steps
    assert kernels.iteration_s(coef, tokens, kv_tokens, pairs, sequences, spec_steps) == pytest.approx(expected)


def test_pairs_count_each_new_token_against_its_context_and_half_of_the_chunk() -> None:
    context, chunk = 7, 5
    exact = sum(context + position for position in range(chunk)) + chunk / 2  # a token sees half of itself, so to say
    assert kernels.attention_pairs(chunk, context) == exact


def test_without_any_slope_there_is_no_bound_on_the_chunk() -> None:
    flat = np.zeros(kernels.COEFFICIENTS)
    flat[kernels.B_1] = 1e-3
    assert kernels.max_prefill_tokens(flat, 2e-3, np.zeros(5), 0) == 2**31 - 1
    assert kernels.max_prefill_tokens(flat, 1e-3, np.zeros(5), 0) == 0
