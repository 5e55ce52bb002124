"""The last minute's quantiles, kept up."""

import numpy as np
import pytest

from controller.window import MOST_SECONDS, SlidingCounts, bin_of, middle_s


@pytest.mark.parametrize("seconds", [0.0, 1e-5, -0.003, 0.25, -7.0, 1e4])
def test_a_bin_is_within_one_percent(seconds: float) -> None:
    assert middle_s(bin_of(seconds)) == pytest.approx(seconds, rel=0.01, abs=1e-6)


def test_quantiles_are_those_of_the_window() -> None:
    rng, window = np.random.default_rng(1), SlidingCounts(60.0)
    times_s, values_s = np.sort(rng.uniform(0.0, 200.0, 5000)), rng.lognormal(-2.0, 1.0, 5000)
    values_s[::3] *= -1.0
    for time_s, value_s in zip(times_s, values_s, strict=True):
        window.note("figure", bin_of(value_s), time_s)
    window.expire(200.0)
    recent = values_s[times_s >= 140.0]
    told = window.quantiles_ms("figure")
    assert told is not None
    for q in (50, 95, 99):
        assert told[f"p{q}"] == pytest.approx(1000.0 * np.percentile(recent, q, method="inverted_cdf"), rel=0.012)


def test_what_left_the_window_leaves_nothing_behind() -> None:
    """However long nobody looked."""
    window = SlidingCounts(10.0)
    for second in range(5 * MOST_SECONDS):
        window.note("figure", second, float(second))
    window.expire(1e6)
    assert window.quantiles_ms("figure") is None
    assert not window._seconds
    assert window.quantiles_ms("unknown") is None
