"""From kernel tables to a profile, where aiconfigurator's library is not asked."""

import numpy as np
import pytest

from profiles.kernel_times import FITS, KERNEL_COLUMNS
from serving.cli.aiconfigurator import ImporterError, grid
from serving.cli.profile_import import KernelGrid, import_profile


def kernels(speed: float, kv_capacity_tokens: int) -> KernelGrid:
    """A device of a millisecond per batch token, and so much faster."""
    points = np.array(list(grid()), dtype="f8")
    decodes, kv_each, chunk, cached = points.T
    milliseconds = (decodes + chunk + 1e-2 * decodes * kv_each + 1e-5 * chunk * (cached + chunk / 2)) / speed
    columns = dict(zip(KERNEL_COLUMNS, (*points.T, milliseconds), strict=True))
    columns[FITS] = (decodes * kv_each + chunk + cached <= kv_capacity_tokens).astype("f8")
    return KernelGrid(columns, kv_capacity_tokens, 0, "planted")


def test_planted_kernels_come_out_again_with_the_overhead_added() -> None:
    profile = import_profile("x", kernels(10.0, 100_000), 1e-3, 1e-4)
    assert profile.fit.mape_pct < 1.0
    assert profile.coefficients[[0, 1]] == pytest.approx([1e-4, 1e-3], abs=1e-6)


@pytest.mark.parametrize(("speed", "kv_capacity_tokens"), [(10.0, 20), (10.0, -5), (1e6, 100_000), (1e-6, 100_000)])
def test_a_grid_of_which_nothing_would_be_served_is_an_error_that_says_so(
    speed: float, kv_capacity_tokens: int
) -> None:
    """Too small a KV cache, or too fast or slow a device: the fit failed with words about arrays."""
    with pytest.raises(ImporterError, match=f"takes 5-120 ms; the KV cache has {kv_capacity_tokens} tokens"):
        import_profile("x", kernels(speed, kv_capacity_tokens), 1e-3, 1e-4)
