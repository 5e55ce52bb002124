"""K-medoids over known graphs, so that a history keeps few of them (Concord section 4.1)."""

import numpy as np

MOST_ROUNDS = 10


def k_medoids(distances: np.ndarray, weights: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Choose ``k`` of n graphs such that the weighted distances of all to their nearest one are small.

    Medoids are seeded farthest first and improved by turns with their clusters (Park and Jun, 2009).

    Args:
        distances: f8[n, n], symmetric.
        weights: f8[n], above 0.

    Returns:
        The medoids (i8[k], ascending) and the position among them of each graph's own (i8[n]).
    """
    medoids = _seeds(distances, weights, k)
    for _ in range(MOST_ROUNDS):
        owner = np.argmin(distances[:, medoids], axis=1)
        better = np.array([_center(distances, weights, np.flatnonzero(owner == c), medoids[c]) for c in range(k)])
        if np.array_equal(better, medoids):
            break
        medoids = better
    medoids = np.sort(medoids)
    return medoids, np.argmin(distances[:, medoids], axis=1)


def _seeds(distances: np.ndarray, weights: np.ndarray, k: int) -> np.ndarray:
    seeds = [int(np.argmin(distances @ weights))]
    away = distances[seeds[0]].copy()
    away[seeds[0]] = -1.0
    while len(seeds) < k:
        seeds.append(int(np.argmax(np.where(away < 0.0, -1.0, away * weights))))
        away = np.where(away < 0.0, away, np.minimum(away, distances[seeds[-1]]))
        away[seeds[-1]] = -1.0
    return np.array(seeds)


def _center(distances: np.ndarray, weights: np.ndarray, members: np.ndarray, now: int) -> int:
    """The member of least weighted distance to the others."""
    if not len(members):
        return now
    return int(members[np.argmin(distances[np.ix_(members, members)] @ weights[members])])
