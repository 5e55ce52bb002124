"""Placement of a whole simulated fleet by ``routing.kernels``, which reads the modelled engines' own tables.

One kernel call per arrival: for runs of hundreds of replicas and hundreds of thousands of requests.
"""

import math
from dataclasses import dataclass, field

import numpy as np
from numba import njit

from routing.kernels import NO_WANTS, NOWHERE, PLACEMENT, place
from routing.mirrors import Mirrors, make_mirrors, summarize
from routing.policy import RoutingPolicy, make_routing, most_wanted, to_ask
from routing.wishes import MOST_LOADED
from simulation.dispatch import Quiet, to_best_effort
from simulation.engine import Engines
from simulation.loop import Simulation


@njit(cache=True)
def refresh(mirrors: Mirrors, engines: Engines, seen: np.ndarray, now_s: float) -> None:
    """Bring the sums up to date with the tables; ``seen`` (i8[R]) are the iterations they were made at."""
    for r in range(len(mirrors.replicas)):
        engine, replica = engines.state[r], mirrors.replicas[r]
        busy = engine["count"] > 0 and engine["free_at_s"] < math.inf
        replica["free_at_s"] = max(now_s, engine["free_at_s"]) if busy else now_s
        if engine["iterations"] != seen[r] or engine["count"] != replica["count"]:
            replica["count"], seen[r] = engine["count"], engine["iterations"]
            summarize(mirrors, r)


class EngineMirrors:
    """Mirrors that read the modelled engines' own tables instead of a copy."""

    def __init__(self) -> None:
        self._mirrors: Mirrors | None = None
        self._seen = np.zeros(0, dtype=np.int64)

    def at(self, simulation: Simulation) -> Mirrors:
        """Up to date with the present tables (they move when they grow)."""
        engines = simulation.engines
        if self._mirrors is None or self._mirrors.tables is not engines.tables:
            replicas, slots = engines.tokens.shape
            mirrors = make_mirrors(replicas, 1)
            mirrors.replicas["is_open"], mirrors.replicas["count"] = True, -1
            self._mirrors = mirrors._replace(
                tables=engines.tables,
                outlooks=np.zeros((replicas, slots), dtype=mirrors.outlooks.dtype),
                coefs=engines.believed,
                cautious=engines.believed,
                limits=engines.limits,
            )
            self._seen = np.full(replicas, -1)
        refresh(self._mirrors, engines, self._seen, simulation.now_s)
        return self._mirrors


@njit(cache=True)
def least_busy(engines: Engines) -> int:
    """The replica with the fewest requests; ties to the lower index."""
    best = 0
    for r in range(1, len(engines.state)):
        if engines.state[r]["count"] < engines.state[best]["count"]:
            best = r
    return best


class PlacedFleet(Quiet):
    """Exact admission where a rule of ``routing.wishes`` wants it; what fits nowhere is served best effort.

    By default the load gradient: the live default's rule keeps all replicas busy, and their replays take several times
    as long over hundreds of thousands of requests.
    """

    def __init__(self, rule: int = MOST_LOADED, max_hops: int = 8) -> None:
        self.rule, self.max_hops, self._mirrors = rule, max_hops, EngineMirrors()

    def dispatch(self, simulation: Simulation, which: np.ndarray) -> None:
        rows = simulation.rows(which)
        hopeless = rows[simulation.has_missed(which)]
        to_best_effort(hopeless)
        rows[simulation.has_missed(which)] = hopeless
        asking = np.flatnonzero(~rows["best_effort"])
        if len(asking):
            mirrors, placements = self._mirrors.at(simulation), np.zeros(len(asking), dtype=PLACEMENT)
            place(mirrors, rows[asking], simulation.now_s, NO_WANTS, self.max_hops, placements, self.rule)
            self._carry_out(simulation, rows, asking, placements)
        for row in rows[rows["best_effort"]]:
            simulation.place(row, least_busy(simulation.engines))

    def _carry_out(self, simulation: Simulation, rows: np.ndarray, asking: np.ndarray, placements: np.ndarray) -> None:
        """Queue what was placed, in the order in which the fleet put it into its tables; the rest is best effort."""
        taken = placements["replica"] != NOWHERE
        for k in np.argsort(rows["prompt_tokens"][asking], kind="stable"):
            if taken[k]:
                simulation.place(rows[asking[k]], int(placements["replica"][k]))
        refused = rows[asking[~taken]]
        to_best_effort(refused)
        rows[asking[~taken]] = refused


@dataclass
class Routed(Quiet):
    """No admission: a routing policy's first choice takes the request as it asked."""

    policy: str = "round_robin"
    seed: int = 0
    turn: int = 0
    router: RoutingPolicy = field(init=False)

    def __post_init__(self) -> None:
        self.router, self._rng = make_routing(self.policy), np.random.default_rng(self.seed)
        self._mirrors = EngineMirrors()

    def dispatch(self, simulation: Simulation, which: np.ndarray) -> None:
        for row in simulation.rows(which):
            target = 0
            if len(simulation.engines.state) > 1:
                self.turn += 1
                replicas = self._mirrors.at(simulation).replicas
                wants = self.router.prefer(to_ask(row), replicas, self.turn, self._rng)
                target = most_wanted(replicas, wants)
            simulation.place(row, target)
