"""A trace without a file."""

import numpy as np

from serving.loadgen.trace import Trace, poisson_arrivals_s


def synthetic_trace(
    requests: int, rate_per_s: float, input_tokens: float, output_tokens: float, seed: int = 0, sigma: float = 0.6
) -> Trace:
    """Poisson arrivals with log-normal lengths of the given medians; ``sigma`` is the spread of the logarithm."""
    rng = np.random.default_rng((seed, 1))
    lengths = np.exp(rng.normal(0.0, sigma, (2, requests))) * [[input_tokens], [output_tokens]]
    prompt, output = np.maximum(1, np.rint(lengths)).astype(np.int64)
    return Trace("synthetic", poisson_arrivals_s(requests, rate_per_s, seed), prompt, output, ["synthetic"] * requests)


def small_trace(requests: int = 8) -> Trace:
    """Short requests, close together."""
    return synthetic_trace(requests, 400.0, input_tokens=20, output_tokens=9, seed=3)
