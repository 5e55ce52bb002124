"""One definition of error for every report."""

import numpy as np
import pytest

from profiles.quality import fit_quality


def test_errors_are_relative_to_the_measured_time() -> None:
    quality = fit_quality([1.1, 1.8, 4.0], [1.0, 2.0, 4.0])
    assert quality.mape_pct == pytest.approx(100 * (0.1 + 0.1 + 0) / 3)
    assert quality.worst_pct == pytest.approx(10)
    assert quality.points == 3


def test_r2_is_one_for_perfect_and_zero_for_the_mean() -> None:
    measured = np.array([1.0, 2.0, 3.0])
    assert fit_quality(measured, measured).r2 == 1
    assert fit_quality(np.full(3, 2.0), measured).r2 == pytest.approx(0)


def test_predictions_that_do_not_match_the_measurements_in_number_are_refused() -> None:
    with pytest.raises(ValueError, match="as many predictions as measurements"):
        fit_quality([1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="as many predictions as measurements"):
        fit_quality([], [])
