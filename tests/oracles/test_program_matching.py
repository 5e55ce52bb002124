"""Matching of programs and clustering of graphs against obvious twins."""

import itertools
import math

import numpy as np
import pytest

from planning.programs.clustering import MOST_ROUNDS, k_medoids
from planning.programs.graph import Nodes, complete_stages, to_stages
from planning.programs.matching import COMPARED, WIDTH, PatternTable, Prefix, node_similarity, ranked, similarities
from tests.support.program_cases import drawn


def slow_similarity(prefix: Prefix, other: np.ndarray) -> float:
    """Stage by stage, kernel by kernel."""
    reached, total, count = len(prefix.stages), 0.0, 0
    if len(other) < reached:
        return 0.0
    for s in range(max(0, reached - COMPARED), reached):
        mine, theirs = prefix.stages[s], other[s]
        if mine["label"] and theirs["label"] and mine["label"] != theirs["label"]:
            return 0.0
        weighed = ["input_tokens"] + ["output_tokens"] * (s < prefix.complete) + ["gap_s"] * (s > 0)
        for name in weighed:
            apart = math.log1p(mine[name]) - math.log1p(theirs[name])
            total, count = total + math.exp(-(apart**2) / (2 * WIDTH**2)), count + 1
    return total / count


@pytest.mark.parametrize("seed", range(20))
def test_similarities_are_those_of_the_twin(seed: int) -> None:
    rng = np.random.default_rng(seed)
    graphs, table = [to_stages(drawn(rng)) for _ in range(30)], PatternTable()
    for row, stages in enumerate(graphs):
        table.put(row, stages)
    own = drawn(rng)
    own["end_s"][own["stage"] == own["stage"].max()] = math.inf
    prefix = Prefix(to_stages(own), complete_stages(own))
    assert similarities(prefix, table) == pytest.approx([slow_similarity(prefix, stages) for stages in graphs])


def slow_node_similarity(own: Nodes, other: Nodes, reached: int) -> float:
    """Both ranked for this pair alone."""

    def ranks(nodes: Nodes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        inside = nodes[nodes["stage"] < reached]
        inside = inside[np.lexsort((inside["input_tokens"], inside["stage"]))]
        starts = np.searchsorted(inside["stage"], inside["stage"])
        keys = inside["stage"].astype(np.int64) << 32 | (np.arange(len(inside)) - starts)
        outputs = np.where(np.isfinite(inside["end_s"]), np.log1p(inside["output_tokens"]), np.nan)
        return keys, np.log1p(inside["input_tokens"]), outputs

    def kernel(apart: np.ndarray) -> np.ndarray:
        return np.asarray(np.exp(-0.5 * (apart / WIDTH) ** 2))

    mine, others = ranks(own), ranks(other)
    common, at, where = np.intersect1d(mine[0], others[0], assume_unique=True, return_indices=True)
    total = len(mine[0]) + len(others[0]) - len(common)
    has_ended = np.isfinite(mine[2][at]) & np.isfinite(others[2][where])
    inputs = kernel(mine[1][at] - others[1][where])
    outputs = np.where(has_ended, kernel(np.nan_to_num(mine[2][at] - others[2][where])), inputs)
    return float((inputs + outputs).sum() / (2 * total)) if total else 1.0


@pytest.mark.parametrize("seed", range(60))
def test_similarities_node_by_node_are_those_of_the_twin(seed: int) -> None:
    rng = np.random.default_rng(seed)
    own, other = (drawn(rng, 1 + seed % 6, int(rng.integers(1, 40))) for _ in range(2))
    for nodes in (own, other):
        nodes["stage"] += int(rng.integers(0, 2))  # the first stage was refused
        nodes["end_s"][rng.random(len(nodes)) < 0.2] = math.inf
        nodes["input_tokens"] = np.round(nodes["input_tokens"], -3)  # ties
    for reached in range(9):
        assert node_similarity(ranked(own), ranked(other), reached) == slow_node_similarity(own, other, reached)


@pytest.mark.parametrize("seed", range(10))
def test_medoids_cost_little_more_than_the_best_of_all_choices(seed: int) -> None:
    rng = np.random.default_rng(seed)
    points, weights = rng.normal(size=(12, 2)), rng.uniform(0.5, 2.0, 12)
    apart = np.linalg.norm(points[:, None] - points[None], axis=2)

    def cost(chosen: tuple[int, ...]) -> float:
        return float(apart[:, list(chosen)].min(axis=1) @ weights)

    medoids, owner = k_medoids(apart, weights, 4)
    assert len(set(medoids.tolist())) == 4
    assert (owner == np.argmin(apart[:, medoids], axis=1)).all()
    best = min(cost(chosen) for chosen in itertools.combinations(range(12), 4))
    assert cost(tuple(medoids.tolist())) <= 1.5 * best


def slow_medoids(apart: np.ndarray, weights: np.ndarray, k: int) -> list[int]:
    """Seed by seed, cluster by cluster, member by member."""
    n = range(len(weights))
    medoids = [min(n, key=lambda i: apart[i] @ weights)]
    while len(medoids) < k:
        away = {i: weights[i] * min(apart[i][m] for m in medoids) for i in n if i not in medoids}
        medoids.append(max(away, key=lambda i: away[i]))
    for _ in range(MOST_ROUNDS):
        owner = [min(range(k), key=lambda c: apart[i][medoids[c]]) for i in n]
        clusters = [[i for i in n if owner[i] == c] for c in range(k)]
        better = [
            min(own, key=lambda i: sum(apart[i][j] * weights[j] for j in own)) if own else now
            for own, now in zip(clusters, medoids, strict=True)
        ]
        if better == medoids:
            break
        medoids = better
    return sorted(medoids)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("copies", [1, 4])
def test_medoids_are_those_of_the_twin(seed: int, copies: int) -> None:
    """Also where graphs are alike and clusters empty: which of those that are alike is left open."""
    rng = np.random.default_rng(seed)
    points, weights = np.repeat(rng.normal(size=(40 // copies, 2)), copies, axis=0), rng.uniform(0.5, 2.0, 40)
    apart = np.linalg.norm(points[:, None] - points[None], axis=2)
    found = k_medoids(apart, weights, 13)[0] // copies
    assert sorted(found.tolist()) == sorted(medoid // copies for medoid in slow_medoids(apart, weights, 13))
