"""Every form evaluates its equation, and takes no time for nothing."""

import numpy as np
import pytest
from scipy.interpolate import RegularGridInterpolator

from profiles import kernels
from profiles.batch import Batch
from profiles.fit import FORMS
from profiles.model import LinearModel, LookupModel, PerfModel, PlainModel, RooflineModel
from tests.support.planted_profile import planted_table

TABLE = planted_table(noise=0.01)


@pytest.fixture(scope="module", params=FORMS)
def model(request: pytest.FixtureRequest) -> PerfModel:
    return FORMS[request.param](TABLE)


def equation_s(model: PerfModel, batch: Batch) -> float:
    """Seconds of one iteration by the form's equation as its paper has it, of a batch that is not empty."""
    if isinstance(model, RooflineModel):
        return float(kernels.iteration_s(model.coefficients, *batch.terms))
    if isinstance(model, PlainModel):
        return float(max(k1 * batch.batch_tokens + k2 * batch.spec_steps + b for k1, k2, b in model.lines))
    if isinstance(model, LookupModel):
        tokens = np.clip(batch.batch_tokens, model.batch_axis[0], model.batch_axis[-1])
        kv_tokens = np.clip(batch.kv_tokens + batch.cached_tokens, model.kv_axis[0], model.kv_axis[-1])
        return RegularGridInterpolator((model.batch_axis, model.kv_axis), model.seconds)((tokens, kv_tokens)).item()
    assert isinstance(model, LinearModel)
    phases = [
        (model.prefill, batch.prefill_seqs, batch.prefill_tokens),
        (model.decode, batch.sequences - batch.prefill_seqs, batch.kv_tokens),
    ]
    total_s = 0.0
    for (alpha, beta, gamma, delta), b, tokens in phases:
        if b > 0:
            length = tokens / b
            total_s += alpha * b * length + beta * b + gamma * length + delta
    return total_s


def test_a_form_carries_the_name_it_is_registered_under(model: PerfModel) -> None:
    assert FORMS[model.name](TABLE).name == model.name


def test_a_table_of_batches_takes_what_the_equation_says_of_each(model: PerfModel) -> None:
    rows = TABLE[::3]
    one_by_one = [equation_s(model, Batch(*row.tolist()[:-1])) for row in rows]
    assert len(set(one_by_one)) > 10
    assert model.iterations_s(rows) == pytest.approx(one_by_one, rel=1e-12)


def test_an_empty_batch_takes_no_time(model: PerfModel) -> None:
    rows = TABLE[:1].copy()
    for name in Batch._fields:
        rows[name] = 0
    assert model.iterations_s(rows).tolist() == [0]
    if isinstance(model, RooflineModel):
        assert model.iteration_s(Batch(0.0, sequences=0.0)) == 0
