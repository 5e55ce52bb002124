"""Placement of a whole simulated fleet by ``routing.kernels``, which reads the modelled engines' own tables.

One kernel call per arrival: for runs of hundreds of replicas and hundreds of thousands of requests.
"""

import math

import numpy as np
from numba import njit

from routing.kernels import NOWHERE, PLACEMENT, SHARED, Fleet, make_fleet, place, summarize
from simulation.dispatch import Quiet, to_best_effort
from simulation.engine import Engines
from simulation.loop import Simulation


@njit(cache=True)
def refresh(fleet: Fleet, engines: Engines, seen: np.ndarray, now_s: float) -> None:
    """Bring the fleet's sums up to date with the tables; ``seen`` (i8[R]) are the iterations they were made at."""
    for r in range(len(fleet.replicas)):
        engine, replica = engines.state[r], fleet.replicas[r]
        busy = engine["count"] > 0 and engine["free_at_s"] < math.inf
        replica["free_at_s"] = max(now_s, engine["free_at_s"]) if busy else now_s
        if engine["iterations"] != seen[r] or engine["count"] != replica["count"]:
            replica["count"], seen[r] = engine["count"], engine["iterations"]
            summarize(fleet, r)


@njit(cache=True)
def least_busy(engines: Engines) -> int:
    """The replica with the fewest requests; ties to the lower index."""
    best = 0
    for r in range(1, len(engines.state)):
        if engines.state[r]["count"] < engines.state[best]["count"]:
            best = r
    return best


class PlacedFleet(Quiet):
    """Load gradient with exact admission on every replica; what fits nowhere is served best effort."""

    def __init__(self, tier_of_replica: np.ndarray | None = None, max_hops: int = 8) -> None:
        self.tier_of_replica, self.max_hops = tier_of_replica, max_hops
        self._fleet: Fleet | None = None
        self._seen = np.zeros(0, dtype=np.int64)

    def _of(self, simulation: Simulation) -> Fleet:
        """The fleet over the engines' present tables (they move when they grow)."""
        engines = simulation.engines
        if self._fleet is None or self._fleet.tables is not engines.tables:
            replicas, slots = engines.tokens.shape
            fleet = make_fleet(replicas, 1)
            fleet.replicas["is_open"] = True
            fleet.replicas["tier"] = SHARED if self.tier_of_replica is None else self.tier_of_replica
            fleet.replicas["count"] = -1
            outlooks = np.zeros((replicas, slots), dtype=fleet.outlooks.dtype)
            self._fleet = fleet._replace(
                tables=engines.tables, outlooks=outlooks, coefs=engines.believed, limits=engines.limits
            )
            self._seen = np.full(replicas, -1)
        return self._fleet

    def dispatch(self, simulation: Simulation, which: np.ndarray) -> None:
        fleet, rows = self._of(simulation), simulation.rows(which)
        hopeless = rows[simulation.has_missed(which)]
        to_best_effort(hopeless)
        rows[simulation.has_missed(which)] = hopeless
        asking = np.flatnonzero(~rows["best_effort"])
        if len(asking):
            refresh(fleet, simulation.engines, self._seen, simulation.now_s)
            placements = np.zeros(len(asking), dtype=PLACEMENT)
            place(fleet, rows[asking], simulation.now_s, self.max_hops, placements)
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
