"""Quantiles of iterations seen: near the true ones, apart by kind of batch, and of what was lately."""

import numpy as np
import pytest

from profiles.kernels import iteration_s
from profiles.online import new_correction, observe
from profiles.online_state import RESIDUALS
from profiles.residuals import BINS, HISTOGRAMS, LEAST_NOTED, MEMORY, TRACKED, note_residual, told_quantiles
from tests.support.planted_profile import COEFFICIENTS


def noted(ratios: np.ndarray, counts: np.ndarray | None = None, has_prefill: bool = False) -> np.ndarray:
    counts = np.zeros(HISTOGRAMS) if counts is None else counts
    for ratio in ratios.tolist():
        note_residual(counts, has_prefill, ratio)
    return counts


@pytest.mark.parametrize("sigma", [0.005, 0.05, 0.3])
@pytest.mark.parametrize("stalls", [0.0, 0.03])
def test_quantiles_are_near_the_true_ones_also_where_iterations_stall(sigma: float, stalls: float) -> None:
    random = np.random.default_rng(0)
    ratios = np.exp(sigma * random.standard_normal(3000)) * np.where(random.random(3000) < stalls, 3.0, 1.0)
    told = told_quantiles(noted(ratios))["decode"]
    for name, level in TRACKED.items():
        truth = np.quantile(ratios, level)
        assert told[name] == pytest.approx(truth, abs=0.003 + 0.13 * abs(truth - 1.0))
    assert told["p50"] <= told["p95"] <= told["p99"]


def test_kinds_are_apart_and_too_few_tell_nothing() -> None:
    few = np.full(LEAST_NOTED - 1, 1.2)
    told = told_quantiles(noted(few, noted(np.full(500, 1.5)), has_prefill=True))
    assert told["decode"]["p95"] == pytest.approx(1.5, rel=0.1)
    assert told["prefill"] == {"iterations": LEAST_NOTED - 1}


def test_what_was_long_ago_is_forgotten() -> None:
    counts = noted(np.full(20_000, 1.01), noted(np.full(20_000, 1.5)))
    assert told_quantiles(counts)["decode"]["p99"] == pytest.approx(1.01, abs=0.01)
    assert counts[:BINS].sum() < MEMORY


@pytest.mark.parametrize("ratio", [1e-300, 1e-3, 1e3, 1e300])
def test_no_ratio_falls_out(ratio: float) -> None:
    assert noted(np.array([ratio])).sum() == 1.0


def test_the_correction_counts_each_iteration_against_its_own_prediction() -> None:
    """A machine twice as slow as its profile strays from what was learnt of it, not from the profile."""
    random, state = np.random.default_rng(1), new_correction(COEFFICIENTS)
    for step in range(3000):
        chunk = 512.0 if step % 3 == 0 else 0.0
        row = np.array([64.0 + chunk, 32000.0, chunk * chunk / 2, 64.0 + (chunk > 0), 0.0])
        model_s = iteration_s(COEFFICIENTS, *row)
        noise = 0.02 if chunk else 0.1
        state = observe(state, COEFFICIENTS, row, 2.0 * model_s * np.exp(noise * random.standard_normal()))
    told = told_quantiles(state[RESIDUALS:])
    assert told["decode"]["iterations"] == 2000
    assert told["decode"]["p95"] == pytest.approx(np.exp(0.1645), abs=0.04)
    assert told["prefill"]["p95"] == pytest.approx(np.exp(0.0329), abs=0.04)
    assert told["prefill"]["p50"] == pytest.approx(1.0, abs=0.03)
