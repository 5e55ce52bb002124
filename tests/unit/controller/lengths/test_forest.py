"""Forests as arrays: the library's quantiles, and arrays that cannot be trusted."""

from dataclasses import replace

import numpy as np
import pytest

from controller.lengths.forest import Forest, grow


def sample(count: int = 3000, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Log-normal lengths whose median doubles with the first of three features."""
    rng = np.random.default_rng(seed)
    rows = rng.uniform(0.0, 4.0, (count, 3)).astype(np.float32)
    return rows, np.rint(np.exp2(4.0 + rows[:, 0]) * rng.lognormal(0.0, 0.4, count)).clip(1)


@pytest.fixture(scope="module")
def forest() -> Forest:
    return grow(*sample(), version=1, trees=20)


def test_its_quantiles_are_those_of_the_library(forest: Forest) -> None:
    from quantile_forest import RandomForestQuantileRegressor

    from controller.lengths.forest import LEAF_SAMPLES, LEAST_LEAF, MOST_DEPTH

    rows, tokens = sample()
    settings = dict(min_samples_leaf=LEAST_LEAF, max_samples_leaf=LEAF_SAMPLES, max_depth=MOST_DEPTH, max_features=0.6)
    library = RandomForestQuantileRegressor(20, random_state=0, **settings).fit(rows, np.log(tokens))
    asked = sample(200, seed=1)[0]
    theirs = np.exp(library.predict(asked, quantiles=[0.5, 0.9]))
    ours = np.quantile(forest.samples(asked), [0.5, 0.9], axis=1).T
    errors = np.abs(np.log(ours / theirs))  # ours has ten quantiles per leaf, theirs all its rows
    assert np.median(errors) < 0.05
    assert np.quantile(errors, 0.95) < 0.25


def test_its_bound_follows_the_feature_that_matters(forest: Forest) -> None:
    asked = np.array([[0.5, 2.0, 2.0], [3.5, 2.0, 2.0]], dtype=np.float32)
    low, high = np.quantile(forest.samples(asked), 0.9, axis=1)
    assert 5.0 < high / low < 13.0


@pytest.mark.parametrize(
    "damage",
    [
        lambda f: {"left": np.zeros_like(f.left)},  # goes round in circles
        lambda f: {"right": f.right + len(f.right)},
        lambda f: {"feature": np.where(f.feature < 0, -1, 9).astype(np.int16)},
        lambda f: {"roots": f.roots[:0]},
        lambda f: {"roots": f.roots + len(f.feature)},
        lambda f: {"values": f.values[:1]},
        lambda f: {"values": np.full_like(f.values, np.nan)},
        lambda f: {"threshold": f.threshold[:-1]},
    ],
)
def test_arrays_that_lead_nowhere_are_refused(forest: Forest, damage: object) -> None:
    with pytest.raises(ValueError, match="forest"):
        replace(forest, **damage(forest))  # type: ignore[operator]


def test_too_few_rows_grow_no_forest() -> None:
    with pytest.raises(ValueError, match="at least"):
        grow(*sample(5), version=1)
