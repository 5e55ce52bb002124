"""Which known graphs a program under way resembles: Gaussian kernels over super-nodes, then over nodes.

Tempo section 4.1 and Concord section 4.1. Weights of nodes are output lengths, of edges input lengths, of tools their
times. They are compared as logarithms, because lengths spread over orders of magnitude. A graph is compared by the
prefix that the program has reached; one whose models or tools differ there is pruned.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from planning.programs.graph import STAGE, Nodes, Stages

WIDTH = 0.7  # of the kernels, in natural logarithms: a factor of two is similar by 0.61
COMPARED = 32  # latest stages of a prefix that count: beyond, another stage tells nothing new
REFINED = 16  # graphs that are compared node by node
NEIGHBOURS = 8  # known graphs that an outlook is made of
RANK_BITS = 32  # of a key of stage and rank
WEIGHED = ("input_tokens", "output_tokens", "gap_s")
SUMMED = tuple(name for name in STAGE.names or () if name != "label")


@dataclass
class PatternTable:
    """Known graphs in arrays of one row each, padded to the longest; rows from ``count`` on are not in use."""

    count: int = 0
    stages: np.ndarray = field(default_factory=lambda: np.zeros((4, 4), dtype=STAGE))  # STAGE[G, S]
    logs: np.ndarray = field(default_factory=lambda: np.zeros((3, 4, 4)))  # of WEIGHED, per graph and stage
    lengths: np.ndarray = field(default_factory=lambda: np.zeros(4, dtype=np.int64))  # stages of each
    sums: np.ndarray = field(default_factory=lambda: np.zeros(4, dtype=STAGE))  # of each one's stages, without labels

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return self.stages.nbytes + self.logs.nbytes

    def put(self, row: int, stages: Stages) -> None:
        """Write a graph into a row in use, or the one after those; the table grows as needed."""
        rows, longest = max(self.stages.shape[0], row + 1), max(self.stages.shape[1], len(stages))
        if (rows, longest) != self.stages.shape:
            self._grow(2 * rows if rows > self.stages.shape[0] else rows, longest)
        self.stages[row], self.logs[:, row], self.lengths[row] = 0, 0.0, len(stages)
        self.stages[row, : len(stages)] = stages
        self.logs[:, row, : len(stages)] = logarithms(stages)
        for name in SUMMED:
            self.sums[name][row] = stages[name].sum()
        self.count = max(self.count, row + 1)

    def keep(self, rows: np.ndarray) -> None:
        """Keep these rows only, in this order."""
        for array in (self.stages, self.lengths, self.sums):
            array[: len(rows)] = array[rows]
        self.logs[:, : len(rows)] = self.logs[:, rows]
        self.count = len(rows)

    def _grow(self, rows: int, longest: int) -> None:
        known, used = self.stages.shape
        stages, logs = np.zeros((rows, longest), dtype=STAGE), np.zeros((3, rows, longest))
        stages[:known, :used], logs[:, :known, :used] = self.stages, self.logs
        self.stages, self.logs = stages, logs
        self.lengths = np.concatenate([self.lengths, np.zeros(rows - known, dtype=np.int64)])
        self.sums = np.concatenate([self.sums, np.zeros(rows - known, dtype=STAGE)])


class Prefix(NamedTuple):
    """A program under way."""

    stages: Stages  # as far as it has come
    complete: int  # of them, ended; of the others the outputs are not known


class Ranked(NamedTuple):
    """A graph's nodes by stage, and within one by input length."""

    keys: np.ndarray  # i8[n], stage and rank in it, ascending
    inputs: np.ndarray  # f8[n], logarithms
    outputs: np.ndarray  # f8[n], of what may still grow nan

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return self.keys.nbytes + self.inputs.nbytes + self.outputs.nbytes

    def until(self, stages: int) -> "Ranked":
        """Its first stages."""
        end = int(np.searchsorted(self.keys, stages << RANK_BITS))
        return Ranked(self.keys[:end], self.inputs[:end], self.outputs[:end])


def logarithms(stages: Stages) -> np.ndarray:
    """Of one more than each weight (f8[3, s], in order of ``WEIGHED``)."""
    return np.log1p(np.array([stages[name] for name in WEIGHED]))


def similarities(prefix: Prefix, known: PatternTable, width: float = WIDTH) -> np.ndarray:
    """Similarity of the program to each known graph (f8[G], 0 to 1): the mean of the kernels of its latest stages.

    Outputs count of complete stages alone, gaps from the second stage on. 0: the graph has ended by then, or called
    another model or tool.
    """
    reached = len(prefix.stages)
    first = max(0, reached - COMPARED)
    span, counted = slice(first, reached), np.ones((3, reached - first))
    counted[1, max(0, prefix.complete - first) :] = 0.0
    counted[2, : 1 if first == 0 else 0] = 0.0
    is_longer = known.lengths[: known.count] >= reached
    found = np.zeros(known.count)
    if not reached or known.logs.shape[2] < reached:
        return is_longer.astype(np.float64)
    own = logarithms(prefix.stages[span])
    rows = np.flatnonzero(is_longer)
    apart = (known.logs[:, rows, span] - own[:, None, :]) / width
    kernels = np.exp(-0.5 * apart * apart) * counted[:, None, :]
    labels, mine = known.stages["label"][rows, span], prefix.stages["label"][span]
    differs = (labels != mine) & (labels != 0) & (mine != 0)
    found[rows] = np.where(differs.any(axis=1), 0.0, kernels.sum(axis=(0, 2)) / counted.sum())
    return found


def ranked(nodes: Nodes) -> Ranked:
    """A graph's nodes, in order: to be made once for a known graph, and once for each look at a program under way."""
    nodes = nodes[np.lexsort((nodes["input_tokens"], nodes["stage"]))]
    starts = np.searchsorted(nodes["stage"], nodes["stage"])
    keys = nodes["stage"].astype(np.int64) << RANK_BITS | (np.arange(len(nodes)) - starts)
    outputs = np.where(np.isfinite(nodes["end_s"]), np.log1p(nodes["output_tokens"]), np.nan)
    return Ranked(keys, np.log1p(nodes["input_tokens"]), outputs)


def node_similarity(own: Ranked, other: Ranked, reached: int, width: float = WIDTH) -> float:
    """Similarity of two graphs node by node over their first ``reached`` stages; 0 to 1.

    Nodes of a stage are paired by rank of input length; one without a partner counts as unlike.
    """
    mine, others = own.until(reached), other.until(reached)
    if not len(mine.keys) or not len(others.keys):
        return float(len(mine.keys) == len(others.keys))
    where = np.minimum(np.searchsorted(others.keys, mine.keys), len(others.keys) - 1)
    at = np.flatnonzero(others.keys[where] == mine.keys)
    where, total = where[at], len(mine.keys) + len(others.keys) - len(at)
    has_ended = np.isfinite(mine.outputs[at]) & np.isfinite(others.outputs[where])
    inputs = _kernel(mine.inputs[at] - others.inputs[where], width)
    outputs = np.where(has_ended, _kernel(np.nan_to_num(mine.outputs[at] - others.outputs[where]), width), inputs)
    return float((inputs + outputs).sum() / (2 * total))


def _kernel(apart: np.ndarray, width: float) -> np.ndarray:
    near: np.ndarray = np.exp(-0.5 * (apart / width) ** 2)
    return near


def graph_similarities(row: int, known: PatternTable, width: float = WIDTH) -> np.ndarray:
    """Similarity of a known graph to every one as wholes (f8[G]): of the shorter to the prefix of the longer, times
    the ratio of their stages."""
    reached, lengths = int(known.lengths[row]), known.lengths[: known.count]
    own, others = known.logs[:, row, :reached], known.logs[:, : known.count, :reached]
    common = np.arange(reached) < lengths[:, None]
    apart = (others - own[:, None, :]) / width
    mean = (np.exp(-0.5 * apart * apart) * common).sum(axis=(0, 2)) / np.maximum(1, 3 * common.sum(axis=1))
    labels, mine = known.stages["label"][: known.count, :reached], known.stages["label"][row, :reached]
    differs = ((labels != mine) & (labels != 0) & (mine != 0) & common).any(axis=1)
    ratio = np.minimum(lengths, reached) / np.maximum(1, np.maximum(lengths, reached))
    near: np.ndarray = np.where(differs, 0.0, mean * ratio)
    return near


def nearest(similarity: np.ndarray, most: int = NEIGHBOURS) -> np.ndarray:
    """Rows of the most similar graphs, the best first, ties by row; none that is unlike (similarity 0)."""
    order = np.argsort(-similarity, kind="stable")[:most]
    rows: np.ndarray = order[similarity[order] > 0.0]
    return rows
