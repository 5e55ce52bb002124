"""How far a replica falls behind its predictions over a run of iterations: learnt online, told with a confidence.

A stream that is planned so far ahead of its deadlines is on time in that share of runs, whatever the distribution of
iteration times is.
"""

import math

from numba import njit

from profiles.batch import Floats
from profiles.online_state import ALLOWED, BEHIND, COUNT, DEFAULT, ERROR, MOST_BEHIND, PRIOR, SCALE, SQUARE, Tuning

RUN = 16  # iterations that a stream stays behind before it gets time to recover; over longer runs prompts get less


@njit(cache=True)
def mean(old: float, value: float, rate: float) -> float:
    """A running mean after one more value."""
    return old + rate * (value - old)


@njit(cache=True)
def follow_run(new: Floats, late: float, tuning: Tuning) -> None:
    """Add one iteration, ``late`` times its prediction too long, to the run; a run that ends moves the scale. ``COUNT``
    has it already.

    The scale tracks the quantile ``confidence`` (quantile tracking of Angelopoulos et al. 2023, "Conformal PID
    control"): whatever the distribution is, and however iterations hang together, that share of runs stays within it.
    A run is judged by the reach told as it began: slow iterations that hang together raise the error while they last.
    """
    rate = max(tuning.averaging_squares, 1.0 / (new[COUNT] + new[PRIOR]))
    new[SQUARE] = mean(new[SQUARE], min(late, tuning.furthest) ** 2, rate)
    new[BEHIND] += late
    new[MOST_BEHIND] = max(new[MOST_BEHIND], new[BEHIND])
    if new[COUNT] % RUN == 0.0:
        is_beyond = 1.0 if new[MOST_BEHIND] > new[ALLOWED] else 0.0
        scale = new[SCALE] * math.exp(tuning.scale_rate * (is_beyond - (1.0 - tuning.confidence)))
        new[SCALE] = min(max(scale, tuning.least_scale), tuning.most_scale)
        new[BEHIND], new[MOST_BEHIND], new[ALLOWED] = 0.0, 0.0, most_behind(new, tuning)


@njit(cache=True)
def reach(state: Floats, tuning: Tuning = DEFAULT) -> float:
    """How far a run of ``RUN`` iterations falls behind its prediction at most, in iterations, with ``confidence``; no
    more than ``furthest`` is told of that."""
    return min(tuning.furthest, most_behind(state, tuning))


@njit(cache=True)
def most_behind(state: Floats, tuning: Tuning) -> float:
    """``reach`` without its bound, which the scale must not run up against.

    The sum of independent errors exceeds x somewhere in the run twice as often as at its end (reflection principle).
    Their standard deviation is that of the last hundred iterations, which knows rare stalls, or that of the last
    few, as normal errors of mean size ``ERROR`` have (``sqrt(pi / 2)`` times that), where it is larger. The scale,
    learnt from the runs seen, corrects that for errors that hang together.
    """
    quantile = math.sqrt(2.0) * _erf_inverse(tuning.confidence)
    deviation = max(math.sqrt(math.pi / 2.0) * state[ERROR], math.sqrt(state[SQUARE]))
    return float(state[SCALE] * quantile * math.sqrt(float(RUN)) * deviation)


@njit(cache=True)
def _erf_inverse(x: float) -> float:
    """Winitzki's approximation, within 0.4 %."""
    log = math.log(1.0 - x * x)
    half = 2.0 / (math.pi * 0.147) + log / 2.0
    return math.sqrt(math.sqrt(half * half - log / 0.147) - half)
