"""A machine whose coefficients are known: its measurements, exact or noisy."""

import numpy as np

from profiles.batch import Floats, MeasuredRange, Table, compositions, measurements
from profiles.model import RooflineModel
from profiles.profile import Profile, Provenance
from profiles.quality import FitQuality
from profiles.spread import KNOTS, IterationSpread, RatioQuantiles

COEFFICIENTS = np.array([1.2e-5, 5e-3, 2.0e-5, 2e-3, 3e-8, 7.5e-10, 4e-5, 0.0])
WIDE = MeasuredRange((0, 1e9), (0, 1e12), (0, 1e15), (0, 1e6), (0, 100))


def planted_model(coefficients: Floats = COEFFICIENTS) -> RooflineModel:
    return RooflineModel(coefficients, WIDE)


def planted_table(noise: float = 0.0, coefficients: Floats = COEFFICIENTS, seed: int = 1) -> Table:
    """A grid of decodes, chunks and both, with times of the planted machine and relative Gaussian noise."""
    grid = np.array(
        [
            (d, k, p, c)
            for d in (0, 1, 8, 64, 256)
            for k in ((128, 1024, 4096) if d else (0,))
            for p in (0, 64, 256, 512, 2048, 4096)
            for c in ((0, 4096) if p else (0,))
            if d + p
        ]
    )
    rows = compositions(*grid.T)
    seconds = planted_model(coefficients).iterations_s(rows)
    return measurements(rows, seconds * (1 + noise * np.random.default_rng(seed).standard_normal(len(rows))))


PROFILE = Profile(
    name="planted",
    coefficients=COEFFICIENTS,
    kv_capacity_tokens=1000,
    measured=MeasuredRange.of(planted_table()),
    fit=FitQuality(0.99, 1.0, 2.0, 3.0, 10, "everywhere"),
    provenance=Provenance("a test", "nobody", ("one", "two")),
)


def lognormal(sigma: float, samples: int = 1000) -> RatioQuantiles:
    """The exact quantiles of log-normal noise with median 1."""
    return RatioQuantiles(samples, tuple(np.exp(sigma * np.array(KNOTS[1:-1])).tolist()))


SPREAD = IterationSpread(lognormal(0.05), lognormal(0.2))
