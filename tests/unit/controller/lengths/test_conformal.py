"""Calibration of bounds, and the windows that no client fills alone."""

import math

import numpy as np
import pytest

from controller.lengths.conformal import BOUNDS, FRESH, LEAST, WINDOW, Conformal, Scores, group_of
from controller.lengths.fair_window import FairWindow


@pytest.mark.parametrize("coverage", [0.8, 0.9, 0.95])
@pytest.mark.parametrize("raw_tokens", [40.0, 4000.0])
def test_a_raw_bound_however_wrong_comes_to_its_nominal_coverage(coverage: float, raw_tokens: float) -> None:
    rng, conformal, covered = np.random.default_rng(1), Conformal(), []
    for tokens in np.rint(rng.lognormal(5.0, 0.6, 4000)).astype(int).tolist():
        covered.append(tokens <= conformal.bound_tokens("raw", 0, raw_tokens, coverage))
        conformal.note("raw", 0, raw_tokens, tokens, "")
    assert np.mean(covered[500:]) == pytest.approx(coverage, abs=0.015)


def test_what_is_left_is_calibrated_and_never_what_was_emitted() -> None:
    conformal = Conformal()
    for _ in range(LEAST):
        conformal.note("raw", 1000, 1100.0, 1050, "")
    assert conformal.bound_tokens("raw", 1000, 1300.0, 0.9) == pytest.approx(1150.0)
    assert conformal.bound_tokens("raw", 0, 1300.0, 0.9) == 1300.0  # of another group


def test_no_client_moves_a_bound_further_than_the_limits() -> None:
    conformal = Conformal()
    for _ in range(2000):
        conformal.note("raw", 0, 1.0, 10**9, "mallory")
    assert conformal.bound_tokens("raw", 0, 100.0, 0.9) == BOUNDS[1] * 100.0


def test_one_tenant_has_a_quarter_of_a_window() -> None:
    window: FairWindow[int] = FairWindow(8)
    for item in range(8):
        window.append("", item)
    for item in range(100, 120):
        window.append("mallory", item)
    assert sorted(window) == [2, 3, 4, 5, 6, 7, 118, 119]


def test_a_full_window_forgets_its_oldest() -> None:
    window: FairWindow[int] = FairWindow(3)
    for item in range(10):
        window.append("" if item % 2 else "b", item)
    assert list(window) == [7, 8, 9]


def test_groups_grow_with_what_was_emitted() -> None:
    groups = [group_of(emitted) for emitted in (0, 49, 50, 51, 150, 151, 10**6)]
    assert groups == sorted(groups)
    assert groups[:6] == [0, 0, 1, 1, 3, 3]


def test_a_group_without_scores_is_corrected_as_the_one_before() -> None:
    conformal = Conformal()
    for _ in range(LEAST):
        conformal.note("raw", 100, 200.0, 150, "")
    assert conformal.bound_tokens("raw", 5000, 6000.0, 0.9) == pytest.approx(5500.0)


def test_the_factor_is_that_of_the_scores_in_the_window() -> None:
    scores, rng = Scores(), np.random.default_rng(1)
    for i in range(3 * WINDOW):
        scores.note("loud" if i % 3 else "", float(rng.lognormal()))
        if i > LEAST and i % FRESH == 0:
            scores._new = FRESH
            place = min(len(scores.recent), math.ceil((len(scores.recent) + 1) * 0.9))
            assert scores.factor(0.9) == min(max(sorted(scores.recent)[place - 1], BOUNDS[0]), BOUNDS[1])
