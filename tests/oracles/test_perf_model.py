"""The closed-form inverse of the roofline against plain bisection, and every inverse against its own forward model."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from profiles.batch import Batch, MeasuredRange, compositions, measurements
from profiles.fit import FORMS
from profiles.model import LookupModel, RooflineModel, largest_chunk
from tests.support.examples import examples

ANYWHERE = MeasuredRange((0, 1e12), (0, 1e12), (0, 1e18), (0, 1e9), (0, 1e9))
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


@examples(2000)
@given(coefficients, batches, st.floats(0, 0.5), st.floats(0, 32768))
def test_the_closed_form_equals_bisection(coef: np.ndarray, batch: Batch, budget_s: float, cached: float) -> None:
    model = RooflineModel(coef, ANYWHERE)
    assume(model.iteration_s(batch.with_chunk(1, cached)) != budget_s)  # a tie for ever, where no slope is above 0
    closed = model.max_prefill_tokens(budget_s, batch, cached)
    found = largest_chunk(model.iteration_s, budget_s, batch, cached, LIMIT)
    # They may differ by the rounding of a square root: then the larger one must be a tie with the budget.
    if closed != found:
        assert abs(closed - found) <= max(1, 1e-6 * found)
        boundary_s = model.iteration_s(batch.with_chunk(max(closed, found), cached))
        assert boundary_s == pytest.approx(budget_s, rel=1e-6)


def grid_table() -> np.ndarray:
    points = [(d, k, p, c) for d in (0, 1, 8, 64) for k in ((64, 1024) if d else (0,))
              for p in (0, 16, 128, 512, 2048) for c in ((0, 1024) if p else (0,)) if d + p]  # fmt: skip
    rows = compositions(*np.array(points).T)
    coef = np.array([1.2e-5, 5e-3, 2.0e-5, 2e-3, 3e-8, 7.5e-10, 4e-5, 0.0])
    return measurements(rows, RooflineModel(coef, ANYWHERE).iterations_s(rows))


MODELS = {name: fit(grid_table()) for name, fit in FORMS.items()}


@pytest.mark.parametrize("form", FORMS)
@examples(300)
@given(st.integers(0, 64), st.floats(1, 2048), st.floats(0, 0.1), st.floats(0, 2048))
def test_a_chunk_fits_the_budget_and_one_token_more_does_not(
    form: str, decode_seqs: int, kv_each: float, budget_s: float, cached: float
) -> None:
    model = MODELS[form]
    beside = Batch(float(decode_seqs), decode_seqs * kv_each, 0.0, float(decode_seqs))
    chunk = model.max_prefill_tokens(budget_s, beside, cached)
    if chunk:
        assert model.iteration_s(beside.with_chunk(chunk, cached)) <= budget_s * (1 + 1e-6)
    more_s = model.iteration_s(beside.with_chunk(chunk + 1, cached))
    at_the_end = isinstance(model, LookupModel) and beside.batch_tokens + chunk + 1 > model.batch_axis[-1]
    assert at_the_end or more_s > budget_s * (1 - 1e-6)
