"""Orders of arrays, for kernels: stable, and compiled once, where each use of NumPy's sorts would compile its own."""

import math

import numpy as np
from numba import float64, int64, njit

from profiles.compiled_once import compiled_once

RUN = 8  # entries that are sorted by insertion before they are merged


@njit(cache=True)
def _stable_order(keys: np.ndarray) -> np.ndarray:
    count = len(keys)
    order, spare = np.arange(count), np.empty(count, dtype=np.int64)
    for start in range(0, count, RUN):
        for k in range(start + 1, min(start + RUN, count)):
            at, key = k, keys[k]
            while at > start and keys[order[at - 1]] > key:
                order[at] = order[at - 1]
                at -= 1
            order[at] = k
    width = RUN
    while width < count:
        for start in range(0, count, 2 * width):
            middle, end = min(start + width, count), min(start + 2 * width, count)
            left, right = start, middle
            for at in range(start, end):
                if right >= end or (left < middle and keys[order[left]] <= keys[order[right]]):
                    spare[at], left = order[left], left + 1
                else:
                    spare[at], right = order[right], right + 1
        order, spare = spare, order
        width *= 2
    return order


@compiled_once(int64[::1](float64[::1]))
def order_of(keys: np.ndarray) -> np.ndarray:
    """Places of ``keys`` (f8[n], no NaN) from the least to the greatest, equal ones as they come (i8[n])."""
    return _stable_order(keys)


@compiled_once(int64[::1](int64[::1]))
def order_of_integers(keys: np.ndarray) -> np.ndarray:
    """``order_of`` for integers (i8[n])."""
    return _stable_order(keys)


@njit(cache=True)
def numbers(column: np.ndarray) -> np.ndarray:
    """A column of a table as an array of its own (f8[n])."""
    found = np.empty(len(column))
    for i in range(len(column)):
        found[i] = column[i]
    return found


@njit(cache=True)
def integers(column: np.ndarray) -> np.ndarray:
    """A column of integers as an array of its own (i8[n])."""
    found = np.empty(len(column), dtype=np.int64)
    for i in range(len(column)):
        found[i] = column[i]
    return found


@njit(cache=True)
def least_of(values: np.ndarray) -> float:
    """The least of ``values`` (f8[n]); inf where there are none. NumPy's own would be compiled for each type."""
    least = math.inf
    for value in values:
        least = min(least, value)
    return least


@compiled_once(float64[::1](float64[::1]))
def distinct(values: np.ndarray) -> np.ndarray:
    """The different ones of ``values`` (f8[n], no NaN) from the least to the greatest."""
    found, count = np.empty(len(values)), 0
    for at in order_of(values):
        if count == 0 or values[at] != found[count - 1]:
            found[count] = values[at]
            count += 1
    return found[:count]


@njit(cache=True)
def place_in(ordered: np.ndarray, value: float) -> int:
    """First place of ``ordered`` (from the least to the greatest) that is not less than ``value``."""
    first, end = 0, len(ordered)
    while first < end:
        middle = (first + end) // 2
        if ordered[middle] < value:
            first = middle + 1
        else:
            end = middle
    return first
