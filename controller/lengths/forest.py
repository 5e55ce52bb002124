"""A quantile regression forest as flat arrays: grown by ``quantile-forest``, asked with numpy alone. Pure.

Meinshausen (2006), "Quantile Regression Forests"; Tempo and Concord bound output lengths by it. Arrays travel between
processes and into checkpoints, so nobody unpickles a model, and whoever asks needs no scikit-learn in its process.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

TREES = 40
LEAST_LEAF = 12  # rows of a leaf at least: what a quantile of it means
LEAF_VALUES = 10  # quantiles that stand for the rows of a leaf
LEAF_SAMPLES = 64  # rows of a leaf that those are taken of, at most
MOST_DEPTH = 14
MOST_NODES = 1 << 20  # of all trees: more is no forest of ours

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Forest:
    """Trees one after the other; a node whose ``feature`` is negative is a leaf and ``left`` is its row of ``values``.

    ``feature`` i2[nodes], ``threshold`` f4[nodes] (not above: to the left), ``left`` and ``right`` i4[nodes], ``roots``
    i4[trees], ``values`` f4[leaves, LEAF_VALUES]: tokens, sorted. ``version`` counts the trainings of a fleet.
    """

    version: int
    features: int
    feature: NDArray[np.int16]
    threshold: Floats
    left: NDArray[np.int32]
    right: NDArray[np.int32]
    roots: NDArray[np.int32]
    values: Floats

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for arrays that asking would run out of, or go round in, for ever."""
        nodes, leaves = len(self.feature), len(self.values)
        if not 0 < nodes <= MOST_NODES or not 0 < len(self.roots) <= nodes:
            raise ValueError(f"forest: {nodes} nodes of {len(self.roots)} trees, at most {MOST_NODES} are possible")
        if not len(self.threshold) == len(self.left) == len(self.right) == nodes:
            raise ValueError("forest: feature, threshold, left and right must be of one length")
        if self.values.ndim != 2 or not self.values.shape[1] or not np.isfinite(self.values).all():
            raise ValueError("forest: values must be finite rows of one length")
        is_leaf, here = self.feature < 0, np.arange(nodes)
        inner, leaf_rows = ~is_leaf, self.left[is_leaf]
        goes_on = (self.left[inner] > here[inner]) & (self.right[inner] > here[inner])  # so every way ends
        ends = (self.left[inner] < nodes) & (self.right[inner] < nodes)
        if not (goes_on & ends).all() or (self.feature[inner] >= self.features).any():
            raise ValueError("forest: a node leads nowhere")
        if (leaf_rows < 0).any() or (leaf_rows >= leaves).any() or self.roots.min() < 0 or self.roots.max() >= nodes:
            raise ValueError("forest: a leaf has no values, or a tree no root")

    def samples(self, rows: Floats) -> Floats:
        """What requests like each of ``rows`` (f4[n, features]) came to: f4[n, trees * values] tokens, each row sorted.

        Trees count alike, and within a leaf its rows (Meinshausen's weights).
        """
        at = np.broadcast_to(self.roots, (len(rows), len(self.roots))).copy().ravel()
        owner = np.repeat(np.arange(len(rows)), len(self.roots))
        going = np.flatnonzero(self.feature[at] >= 0)
        while len(going):
            node = at[going]
            is_left = rows[owner[going], self.feature[node]] <= self.threshold[node]
            at[going] = node = np.where(is_left, self.left[node], self.right[node])
            going = going[self.feature[node] >= 0]
        found: Floats = self.values[self.left[at]].reshape(len(rows), -1)
        return np.sort(found, axis=1)


def grow(rows: Floats, tokens: NDArray[np.float64], version: int, seed: int = 0, trees: int = TREES) -> Forest:
    """A forest of requests that have finished: ``rows`` f4[n, features], their output ``tokens`` f8[n].

    Splits follow the logarithm of the length, because lengths are skewed. Takes a second for 10,000 rows: for a process
    of its own. Raises ``ValueError`` where there are too few rows for a leaf.
    """
    if len(rows) < 2 * LEAST_LEAF:
        raise ValueError(f"forest: {len(rows)} rows, at least {2 * LEAST_LEAF} are needed")
    from quantile_forest import RandomForestQuantileRegressor  # heavy: only where forests are grown

    model = RandomForestQuantileRegressor(
        trees,
        min_samples_leaf=LEAST_LEAF,
        max_samples_leaf=LEAF_SAMPLES,
        max_depth=MOST_DEPTH,
        max_features=0.6,
        random_state=seed,
    )
    model.fit(rows, np.log(np.maximum(1.0, tokens)))
    return _flatten(model, tokens, version)


def _flatten(model: Any, tokens: NDArray[np.float64], version: int) -> Forest:
    """The library's trees as arrays, with the quantiles of each leaf's rows."""
    sorted_tokens = np.sort(tokens)  # the library's leaves hold positions, from 1, among the sorted targets
    shares = (np.arange(LEAF_VALUES) + 0.5) / LEAF_VALUES
    parts: dict[str, list[NDArray[Any]]] = {name: [] for name in ("feature", "threshold", "left", "right", "values")}
    roots, nodes, leaves = [], 0, 0
    for tree, held in zip(model.estimators_, np.asarray(model.forest_.y_train_leaves), strict=True):
        t = tree.tree_
        is_leaf = t.children_left < 0
        places = np.flatnonzero(is_leaf)
        rank = np.cumsum(is_leaf) - 1
        parts["feature"].append(np.where(is_leaf, -1, t.feature))
        parts["threshold"].append(t.threshold)
        parts["left"].append(np.where(is_leaf, leaves + rank, nodes + t.children_left))
        parts["right"].append(np.where(is_leaf, -1, nodes + t.children_right))
        own = [held[place, 0] for place in places]
        parts["values"] += [np.quantile(sorted_tokens[each[each > 0] - 1], shares)[None] for each in own]
        roots.append(nodes)
        nodes, leaves = nodes + t.node_count, leaves + len(places)
    kinds = {"feature": np.int16, "threshold": np.float32, "left": np.int32, "right": np.int32, "values": np.float32}
    arrays: dict[str, Any] = {name: np.concatenate(parts[name]).astype(kind) for name, kind in kinds.items()}
    return Forest(version, int(model.n_features_in_), roots=np.array(roots, dtype=np.int32), **arrays)
