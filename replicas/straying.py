"""How iterations of a modelled engine differ from its profile: as the profile's own spread says, or by a sigma."""

import math

import numpy as np

from profiles.spread import stray_factor


class Straying:
    """Draws the factor of one iteration after the other; false where iterations are exact, which draws nothing."""

    def __init__(self, sigma: float, logs: list[list[float]], random: np.random.Generator) -> None:
        self._sigma, self._logs, self._random = sigma, np.array(logs, dtype=np.float64), random

    def __bool__(self) -> bool:
        return self._sigma > 0 or len(self._logs) > 0

    def factor(self, has_prefill: bool) -> float:
        """How many times the profile's time the next iteration takes."""
        if self._sigma > 0:
            return math.exp(self._random.normal(-self._sigma * self._sigma / 2, self._sigma))
        if not len(self._logs):
            return 1.0
        return float(stray_factor(self._logs[int(has_prefill)], self._random.standard_normal()))
