"""Every form answers the protocol's questions alike."""

import numpy as np
import pytest

from profiles.batch import Batch, decodes
from profiles.fit import FORMS
from profiles.model import MAX_CHUNK_TOKENS, PerfModel
from tests.support.planted_profile import planted_table

TABLE = planted_table(noise=0.01)


@pytest.fixture(scope="module", params=FORMS)
def model(request: pytest.FixtureRequest) -> PerfModel:
    return FORMS[request.param](TABLE)


def test_a_form_carries_the_name_it_is_registered_under(model: PerfModel) -> None:
    assert FORMS[model.name](TABLE).name == model.name


def test_vectorised_and_scalar_predictions_agree(model: PerfModel) -> None:
    rows = TABLE[::3]
    scalar = [model.iteration_s(Batch(*row.tolist()[:-1])) for row in rows]
    assert model.iterations_s(rows) == pytest.approx(scalar, rel=1e-12)


def test_an_empty_batch_takes_no_time(model: PerfModel) -> None:
    empty = Batch(0.0, sequences=0.0)
    assert model.iteration_s(empty) == 0
    rows = TABLE[:1].copy()
    for name in Batch._fields:
        rows[name] = 0
    assert model.iterations_s(rows).tolist() == [0]


def test_more_budget_never_gives_a_smaller_chunk(model: PerfModel) -> None:
    beside = decodes(16, 512)
    chunks = [model.max_prefill_tokens(budget_s, beside) for budget_s in np.linspace(0, 0.08, 30)]
    assert chunks == sorted(chunks)
    assert chunks[0] == 0
    assert chunks[-1] > 0


def test_longer_cached_context_never_gives_a_larger_chunk(model: PerfModel) -> None:
    chunks = [model.max_prefill_tokens(0.05, decodes(4, 512), cached) for cached in (0, 1000, 4000)]
    assert chunks == sorted(chunks, reverse=True)


def test_a_budget_without_end_is_answered_with_a_finite_chunk(model: PerfModel) -> None:
    assert 0 < model.max_prefill_tokens(1e9, decodes(1, 128)) <= MAX_CHUNK_TOKENS
