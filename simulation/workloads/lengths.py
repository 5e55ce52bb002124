"""Token lengths drawn from published statistics: percentiles, or mean, standard deviation and P99."""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import numpy as np
from scipy.optimize import minimize
from scipy.stats import norm

from profiles.suggest import suggest_near

MOMENTS = ("mean", "std", "p99")
PERCENTILES = tuple(f"p{number}" for number in range(1, 100))
GRID = norm.ppf((np.arange(4000) + 0.5) / 4000)  # quantiles on which statistics are matched


class Lengths(Protocol):
    """A distribution of token counts."""

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """``count`` lengths, int64, at least 1."""
        ...


class CappedLogNormal:
    """A log-normal cut off at ``cap`` (a context or output limit), matched to a printed mean, std and P99.

    Two of the three fix a plain log-normal; the cap is what reconciles a P99 far below the tail of that.
    """

    def __init__(self, mean: float, std: float, p99: float) -> None:
        self.location, self.scale, self.cap = _match(mean, std, p99)

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        tokens = np.minimum(np.exp(rng.normal(self.location, self.scale, count)), self.cap)
        return np.maximum(1, np.rint(tokens)).astype(np.int64)


@lru_cache(maxsize=64)
def _match(mean: float, std: float, p99: float) -> tuple[float, float, float]:
    """Location and scale of the logarithm, and the cap, that come closest to the three statistics."""
    printed = np.array([mean, std, p99])

    def distance(x: np.ndarray) -> float:
        tokens = np.minimum(np.exp(x[0] + abs(x[1]) * GRID), np.exp(x[2]))
        got = np.array([tokens.mean(), tokens.std(), np.percentile(tokens, 99)])
        return float((((got - printed) / printed) ** 2).sum())

    variance = np.log1p((std / mean) ** 2)
    start = np.array([np.log(mean) - variance / 2, np.sqrt(variance), np.log(p99) + 0.2])
    found = minimize(distance, start, method="Nelder-Mead", options={"maxiter": 4000, "xatol": 1e-6, "fatol": 1e-12})
    return float(found.x[0]), float(abs(found.x[1])), float(np.exp(found.x[2]))


class Percentiles:
    """Linear between printed percentiles; from 1 token at the lowest, and no further than the highest goes on."""

    def __init__(self, points: Mapping[float, float]) -> None:
        shares = sorted(points)
        values = [points[share] for share in shares]
        slope = (values[-1] - values[-2]) / (shares[-1] - shares[-2])
        self.shares = np.array([0.0, *shares, 1.0])
        self.values = np.array([1.0, *values, values[-1] + slope * (1.0 - shares[-1])])

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        tokens = np.interp(rng.random(count), self.shares, self.values)
        return np.maximum(1, np.rint(tokens)).astype(np.int64)


class Empirical:
    """Lengths drawn with equal chance from observed ones."""

    def __init__(self, tokens: Sequence[int] | np.ndarray) -> None:
        self.tokens = np.asarray(tokens, dtype=np.int64)

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        drawn: np.ndarray = rng.choice(self.tokens, count)
        return drawn


def check_statistics(printed: Mapping[str, float]) -> None:
    """Raise ``ValueError`` that begins with the key of an entry that ``from_statistics`` does not take as meant."""
    for name, value in printed.items():
        if name not in MOMENTS and name not in PERCENTILES:
            near = suggest_near(name, (*MOMENTS, *PERCENTILES))
            raise ValueError(f"{name}: unknown key; {near or 'known: mean, std and p99, or p1 to p99'}")
        if not value > 0:
            raise ValueError(f"{name}: must be above 0, got {value:g}")
    if "mean" in printed or "std" in printed:
        _check_moments(printed)
        return
    points = [(name, printed[name]) for name in PERCENTILES if name in printed]
    for (lower, less), (higher, more) in pairwise(points):
        if more < less:
            raise ValueError(f"{higher}: must not be below {lower} ({less:g}), got {more:g}")
    if len(points) == 1:
        raise ValueError(f"{points[0][0]}: needs another percentile, or mean and std")


def _check_moments(printed: Mapping[str, float]) -> None:
    for name in MOMENTS:
        if name not in printed:
            raise ValueError(f"{name}: is required beside {' and '.join(sorted(printed.keys() & {*MOMENTS}))}")
    for name in printed:
        if name not in MOMENTS:
            raise ValueError(f"{name}: has no effect beside mean, std and p99; leave it out")


def from_statistics(printed: Mapping[str, float]) -> Lengths:
    """The distribution of one printed entry: ``{mean, std, p99}`` or ``{p25, p50, ...}``."""
    if {"mean", "std", "p99"} <= set(printed):
        return CappedLogNormal(printed["mean"], printed["std"], printed["p99"])
    points = {
        float(name[1:]) / 100.0: value for name, value in printed.items() if name[0] == "p" and name[1:].isdigit()
    }
    if len(points) < 2:
        raise ValueError(f"lengths: need mean, std and p99, or at least two percentiles, got {sorted(printed)}")
    return Percentiles(points)


def read_published(path: Path) -> dict[str, dict[str, dict[str, Lengths]]]:
    """Distributions of ``lengths_published.json``: paper, data set, then ``input`` (or ``prompt``) and ``output``."""
    found: dict[str, dict[str, dict[str, Lengths]]] = {}
    for paper, content in json.loads(path.read_text()).items():
        if isinstance(content, dict) and isinstance(content.get("datasets"), dict):
            found[paper] = {name: _data_set(entry) for name, entry in content["datasets"].items()}
    return found


def _data_set(entry: Mapping[str, object]) -> dict[str, Lengths]:
    """Every part of an entry that is a set of statistics."""
    return {name: from_statistics(part) for name, part in entry.items() if isinstance(part, dict) and "p99" in part}
