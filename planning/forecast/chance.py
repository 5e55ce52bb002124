"""How likely a first token comes in time, by how much iterations stray from their predictions. Pure.

A newcomer's first token comes after the iteration in flight, and after those that compute its prompt. Their times are
taken to be normal around the predictions. Nobody knows the iteration in flight exactly: one that should be about to end
may have ended, and the next one, of which a newcomer is no part, may have begun. Then it waits for that one too.
"""

import math

from numba import njit

DEVIATIONS = math.sqrt(math.pi / 2.0)  # standard deviations in a mean absolute error, of a normal distribution
LEAST_SHARE = 1e-6  # of cases, that are looked at


@njit(cache=True)
def normal_share(x: float) -> float:
    """Cumulative distribution function of the standard normal distribution."""
    return 0.5 * math.erfc(-x / math.sqrt(2.0))


@njit(cache=True)
def _share_in_time(spare_s: float, deviation_s: float) -> float:
    if deviation_s <= 0.0:
        return 1.0 if spare_s >= 0.0 else 0.0
    return normal_share(spare_s / deviation_s)


@njit(cache=True)
def chance_in_time(
    spare_s: float, own_s: float, flight_s: float, fixed_in_s: float, deviations: tuple[float, float, float]
) -> float:
    """Chance that a first token is there when it is due, from 0 to 1.

    It is expected ``spare_s`` before that, ``own_s`` after the iteration in flight, which takes ``flight_s`` (0: none
    is). The next batch is fixed in ``fixed_in_s``. ``deviations``: standard deviations of an iteration's time relative
    to it, and in seconds of when the iteration in flight ends and of when the batch is fixed.
    """
    relative, ends_s, fixed_s = deviations
    one_s = min(own_s, flight_s) if flight_s > 0.0 else own_s  # about one of those that compute its prompt
    deviation_s = math.sqrt(ends_s * ends_s + relative * relative * own_s * one_s)
    in_time = _share_in_time(spare_s, deviation_s)
    if flight_s <= 0.0 or fixed_s <= 0.0:
        return in_time
    place = fixed_in_s / fixed_s
    gone = normal_share(-place)  # the chance that the batch is fixed already
    if gone < LEAST_SHARE:
        return in_time
    sooner_s = fixed_s * math.exp(-0.5 * place * place) / (math.sqrt(2.0 * math.pi) * gone)  # in the mean, if it is
    return max(0.0, in_time - gone) + gone * _share_in_time(spare_s - flight_s + sooner_s, deviation_s)
