"""How likely a first token comes in time, by how much iterations stray from their predictions. Pure.

A newcomer is part of the first batch that is formed after it has come. Its first token comes after the iterations that
compute its prompt, which begin then. Iterations' times are taken to be normal around their predictions. So the more of
them have begun since the engine told of one, the less is known of when the next batch is formed. One that should be
about to be formed may have been, without the newcomer: then that waits for the one after it.
"""

import math

from numba import njit

DEVIATIONS = math.sqrt(math.pi / 2.0)  # standard deviations in a mean absolute error, of a normal distribution
REACH = 4.0  # standard deviations, beyond which nothing is looked at
POINTS = 24  # at which the time until the next batch is formed is looked at


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
def _density(formed_in_s: float, expected_s: float, unknown: int, flight_s: float, relative: float) -> float:
    """That the next batch is formed ``formed_in_s`` from now, up to a factor.

    The batch that is expected next is the ``unknown``-th since the engine told of one; it may be one that comes before
    or after that. The one before it must be past: of that is known where it was told, and where the next one is.
    """
    found, one_s, told_s = 0.0, relative * flight_s, expected_s - unknown * flight_s
    farthest = math.ceil(REACH * relative * math.sqrt(unknown + 1.0)) + 1
    for number in range(max(1, unknown - farthest), unknown + farthest + 1):
        deviation_s = one_s * math.sqrt(number)
        off = (formed_in_s - told_s - number * flight_s) / deviation_s
        if abs(off) <= REACH:
            before = (number - 1.0) / number
            past = _share_in_time(-told_s - (formed_in_s - told_s) * before, one_s * math.sqrt(before))
            found += past * math.exp(-0.5 * off * off) / deviation_s
    return found


@njit(cache=True)
def chance_in_time(
    spare_s: float, deviation_s: float, formed_in_s: float, flight_s: float, unknown: int, relative: float
) -> float:
    """Chance that a first token is there when it is due, from 0 to 1.

    It is expected ``spare_s`` before that, with a standard deviation of ``deviation_s`` from when the next batch is
    formed. That is expected ``formed_in_s`` from now, where iterations take ``flight_s`` with a deviation ``relative``
    to it. It would be the ``unknown``-th batch since the engine told when it forms one; 0: it has told of this one.
    """
    if unknown <= 0 or flight_s <= 0.0 or relative <= 0.0:
        return _share_in_time(spare_s, deviation_s)
    longest_s = flight_s * (1.0 + REACH * relative)  # until the next batch is formed
    if spare_s + formed_in_s - longest_s > REACH * deviation_s:
        return 1.0
    in_time, weights, step_s = 0.0, 0.0, longest_s / POINTS
    for point in range(POINTS):
        each_s = (point + 0.5) * step_s
        weight = _density(each_s, formed_in_s, unknown, flight_s, relative)
        weights += weight
        in_time += weight * _share_in_time(spare_s + formed_in_s - each_s, deviation_s)
    return in_time / weights if weights > 0.0 else _share_in_time(spare_s, deviation_s)
