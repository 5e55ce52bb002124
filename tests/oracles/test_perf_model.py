"""The closed-form inverse of the roofline against plain bisection, and against its own forward model."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from profiles import kernels
from profiles.batch import Batch
from tests.support.examples import examples
from tests.support.planted_profile import planted_model

LIMIT = 2**31 - 1


def zero_or(low: float, high: float) -> st.SearchStrategy[float]:
    return st.one_of(st.just(0.0), st.floats(low, high))


coefficients = st.tuples(
    zero_or(1e-9, 1e-3), st.floats(0, 2e-2), zero_or(1e-9, 1e-3), st.floats(0, 2e-2),
    zero_or(1e-12, 1e-6), zero_or(1e-12, 1e-7), zero_or(1e-9, 1e-3), zero_or(1e-9, 1e-3),
).map(np.array)  # fmt: skip
batches = st.builds(
    lambda tokens, kv, pairs, extra, spec: Batch(float(tokens), kv, pairs, float(tokens + extra), float(spec)),
    st.integers(0, 4096), st.floats(0, 1e6), st.floats(0, 1e7), st.integers(0, 8), st.integers(0, 8),
)  # fmt: skip


def largest_chunk(iteration_s: Callable[[Batch], float], budget_s: float, batch: Batch, cached: float) -> int:
    """The most tokens of one more sequence, on ``cached`` ones, that fit beside ``batch``, by bisection."""
    low, high = 0, LIMIT
    while low < high:
        middle = (low + high + 1) // 2
        if iteration_s(batch.with_chunk(middle, cached)) <= budget_s:
            low = middle
        else:
            high = middle - 1
    return low


def closed_form(coef: np.ndarray, budget_s: float, batch: Batch, cached: float) -> int:
    return int(kernels.max_prefill_tokens(coef, budget_s, np.array(batch.terms), cached))


@examples(2000)
@given(coefficients, batches, st.floats(0, 0.5), st.floats(0, 32768))
def test_the_closed_form_equals_bisection(coef: np.ndarray, batch: Batch, budget_s: float, cached: float) -> None:
    model = planted_model(coef)
    assume(model.iteration_s(batch.with_chunk(1, cached)) != budget_s)  # a tie for ever, where no slope is above 0
    closed = closed_form(coef, budget_s, batch, cached)
    found = largest_chunk(model.iteration_s, budget_s, batch, cached)
    # They may differ by the rounding of a square root: then the larger one must be a tie with the budget.
    assert abs(closed - found) <= max(1, 1e-6 * found)
    if closed != found:
        boundary_s = model.iteration_s(batch.with_chunk(max(closed, found), cached))
        assert boundary_s == pytest.approx(budget_s, rel=1e-6)


@examples(300)
@given(st.integers(0, 64), st.floats(1, 2048), st.floats(0, 0.1), st.floats(0, 2048))
def test_a_chunk_fits_the_budget_and_one_token_more_does_not(
    decode_seqs: int, kv_each: float, budget_s: float, cached: float
) -> None:
    model = planted_model()
    beside = Batch(float(decode_seqs), decode_seqs * kv_each, 0.0, float(decode_seqs))
    chunk = closed_form(model.coefficients, budget_s, beside, cached)
    if chunk:
        assert model.iteration_s(beside.with_chunk(chunk, cached)) <= budget_s * (1 + 1e-6)
    assert model.iteration_s(beside.with_chunk(chunk + 1, cached)) > budget_s * (1 - 1e-6)
