"""Arrival times, all scaled to a mean rate: Poisson, Gamma, or the shape of a trace."""

import numpy as np


def poisson_s(rng: np.random.Generator, count: int, rate_per_s: float) -> np.ndarray:
    """Arrivals with exponential gaps."""
    return gamma_s(rng, count, rate_per_s, 1.0)


def gamma_s(rng: np.random.Generator, count: int, rate_per_s: float, cv: float) -> np.ndarray:
    """Arrivals with Gamma gaps of this coefficient of variation (1: Poisson, more: bursty)."""
    if not (rate_per_s > 0 and cv > 0):
        raise ValueError(f"arrivals: rate and cv must be positive, got {rate_per_s} and {cv}")
    shape = 1.0 / cv**2
    gaps_s = rng.gamma(shape, 1.0 / shape, count)
    return np.asarray(np.cumsum(gaps_s) / rate_per_s, dtype=np.float64)


def shaped_s(rng: np.random.Generator, trace_s: np.ndarray, count: int, rate_per_s: float) -> np.ndarray:
    """``count`` consecutive arrivals of a trace from a random one on (around its end), time-scaled to the mean rate.

    Draws only where the stretch begins, so one seed gives the same bursts at every rate.

    Raises:
        ValueError: where these arrivals take no time, so that no scale gives them a rate.
    """
    trace_s = np.sort(trace_s)  # sessions may be listed one after the other
    gaps_s = np.diff(trace_s, append=trace_s[-1] + (trace_s[-1] - trace_s[0]) / max(1, len(trace_s) - 1))
    start = int(rng.integers(len(trace_s)))
    gaps_s = gaps_s[(start + np.arange(count)) % len(gaps_s)]
    times_s = np.concatenate(([0.0], np.cumsum(gaps_s)))
    if not times_s[-1] > 0.0:
        raise ValueError(f"workload.arrivals: {count} arrivals of the trace are at one time, which has no rate")
    return np.asarray(times_s[:-1] * (count / rate_per_s / times_s[-1]), dtype=np.float64)


def daily_s(rng: np.random.Generator, trace_s: np.ndarray, count: int, day_s: float, swing: float) -> np.ndarray:
    """``count`` arrivals over a day that begins at midnight, the bursts of a trace on a sine of the hour.

    The rate goes from ``1 - swing`` times its mean to ``1 + swing`` times at noon; gaps of the trace are stretched and
    compressed to it, so that what is bursty stays so.
    """
    even = shaped_s(rng, trace_s, count, float(count))  # as parts of all work, from 0 to 1
    hours = np.linspace(0.0, 1.0, 4097)
    work = hours - swing * np.sin(2.0 * np.pi * hours) / (2.0 * np.pi)
    return np.asarray(day_s * np.interp(even, work, hours), dtype=np.float64)
