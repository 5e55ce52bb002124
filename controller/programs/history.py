"""Programs that have ended, as pattern graphs: few of them per application, by K-medoids with decay. Pure.

Concord section 4.1: patterns are clustered, and those of low reuse are evicted, with use decayed by 0.9 every hour.
"""

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from planning.programs.clustering import k_medoids
from planning.programs.deadlines import Outlook, outlook
from planning.programs.graph import Nodes, execution_s, to_stages
from planning.programs.matching import (
    REFINED,
    PatternTable,
    Prefix,
    Ranked,
    graph_similarities,
    nearest,
    node_similarity,
    ranked,
    similarities,
)
from protocol.programs import INF

MOST_GRAPHS = 512  # of an application; then they are reduced to
MEDOIDS = 256
MOST_STAGES = 512  # longer programs are not remembered
DECAY, DECAY_S = 0.9, 3600.0
GAPS, FEW_GAPS = 256, 4  # tool times that are kept, and that say something
SCALES, FEW_SCALES, PRIOR_SCALE = 64, 4, 3.0  # deadlines that are kept, that say something, and one before that
TIGHT = 0.1  # quantile of them
LEAST_USE = 0.05  # a pattern used less is forgotten when patterns are reduced


@dataclass(frozen=True)
class Match:
    """Known graphs that resemble a program, the nearest first."""

    rows: np.ndarray  # i8[k]
    similarity: np.ndarray  # f8[k], 0 to 1


@dataclass
class History:
    """The pattern graphs of one application."""

    table: PatternTable = field(default_factory=PatternTable)
    ranked: list[Ranked] = field(default_factory=list)  # of each graph, its nodes
    uses: np.ndarray = field(default_factory=lambda: np.zeros(0))  # programs that each stands for, and its matches
    decayed_s: float = -np.inf
    gaps_s: deque[float] = field(default_factory=lambda: deque(maxlen=GAPS))  # tool times lately, ended or not
    scales: deque[float] = field(default_factory=lambda: deque(maxlen=SCALES))  # of deadlines of programs that ended
    _ranked_bytes: int = 0
    _apart: np.ndarray = field(default_factory=lambda: np.zeros((MOST_GRAPHS, MOST_GRAPHS)))  # distances

    @property
    def nbytes(self) -> int:
        """Memory that it takes: graphs by their stages and by their nodes, and those distances that have been noted."""
        rows = min(len(self.table.lengths), MOST_GRAPHS)
        return self.table.nbytes + self._ranked_bytes + rows * self._apart.strides[0]

    def __len__(self) -> int:
        return self.table.count

    def learn(self, nodes: Nodes, now_s: float) -> None:
        """A program has ended."""
        stages = to_stages(nodes)
        if len(stages) > MOST_STAGES:
            return
        self._decay(now_s)
        if self.table.count == MOST_GRAPHS:
            self._reduce()
        row = self.table.count
        self.table.put(row, stages)
        self.ranked.append(ranked(nodes))
        self._ranked_bytes += self.ranked[-1].nbytes
        self.uses = np.append(self.uses, 1.0)
        self._apart[row, : row + 1] = self._apart[: row + 1, row] = 1.0 - graph_similarities(row, self.table)

    def match(self, nodes: Nodes, prefix: Prefix) -> Match:
        """The known graphs nearest to a program under way: by super-nodes, and the best of those node by node."""
        found = similarities(prefix, self.table)
        rows = nearest(found, REFINED)
        if len(rows) and (prefix.stages["requests"] > 1).any():
            reached = len(prefix.stages)
            own = ranked(nodes)
            finer = np.array([node_similarity(own, self.ranked[row], reached) for row in rows.tolist()])
            found[rows] = 0.5 * (found[rows] + finer)
        rows = nearest(np.where(np.isin(np.arange(len(found)), rows), found, 0.0))
        return Match(rows, found[rows])

    def outlook(self, match: Match, stage: int, token_s: float, prompt_token_s: float) -> Outlook:
        """What the matched graphs say from this stage on, on engines of this speed (``planning.programs.graph``)."""
        stages = self.table.stages[match.rows]
        longest = int(self.table.lengths[match.rows].max(initial=stage + 1))
        chosen = np.zeros((len(stages), longest), dtype=stages.dtype)  # this stage may be beyond all that is known
        chosen[:, : stages.shape[1]] = stages[:, :longest]
        return outlook(match.similarity, execution_s(chosen, token_s, prompt_token_s), chosen["gap_s"], stage)

    def execution_s(self, token_s: float, prompt_token_s: float) -> np.ndarray:
        """What the calls of each known program take on idle engines of this speed (f8[g])."""
        return execution_s(self.table.sums[: self.table.count], token_s, prompt_token_s)

    def patience_s(self, calls: int) -> float:
        """After how long without a call a program that made ``calls`` has more likely ended than not, while no known
        graph resembles it: by the tool times of all programs, as if the next call were as likely as each one so far to
        be the last."""
        return float(np.quantile(self.gaps_s, calls / (calls + 1.0))) if len(self.gaps_s) >= FEW_GAPS else INF

    def note_scale(self, scale: float) -> None:
        """A program with a deadline has ended (``OpenProgram.scale``)."""
        self.scales.append(scale)

    def least_scale(self) -> float:
        """How many times as long as on idle engines deadlines of this application let calls take, tight ones: a client
        sets a deadline by the size of its task, so what is left of one says how much may still come."""
        return max(1.0, float(np.quantile(self.scales, TIGHT))) if len(self.scales) >= FEW_SCALES else PRIOR_SCALE

    def on_match(self, match: Match) -> None:
        """The nearest graph was of use."""
        if len(match.rows):
            self.uses[match.rows[0]] += 1.0

    def _decay(self, now_s: float) -> None:
        hours = (now_s - self.decayed_s) / DECAY_S
        if hours >= 1.0 or hours < 0.0:
            self.uses *= DECAY ** min(hours, 1e3) if np.isfinite(hours) else 1.0
            self.decayed_s = now_s

    def _reduce(self) -> None:
        """Replace the graphs by medoids, each with the uses of its cluster; those hardly used go first."""
        rows = np.flatnonzero(self.uses >= LEAST_USE)
        if len(rows) > MEDOIDS:
            is_all = len(rows) == len(self._apart)  # as usual: nothing to copy
            apart = self._apart if is_all else np.take(self._apart[rows], rows, axis=1)
            medoids, owner = k_medoids(apart, self.uses[rows], MEDOIDS)
            uses = np.bincount(owner, weights=self.uses[rows], minlength=MEDOIDS)
            rows = rows[medoids]
        else:
            uses = self.uses[rows]
        self._apart[: len(rows), : len(rows)] = np.take(self._apart[rows], rows, axis=1)
        self.table.keep(rows)
        self.ranked, self.uses = [self.ranked[row] for row in rows.tolist()], uses
        self._ranked_bytes = sum(each.nbytes for each in self.ranked)
