"""Placement of a whole simulated fleet by ``routing.placement``, which reads the modelled engines' own tables.

One kernel call per arrival: for runs of hundreds of replicas and hundreds of thousands of requests.
"""

import math
from dataclasses import dataclass, field

import numpy as np
from numba import njit

from planning.tables import to_best_effort
from routing.fleet_state import FleetState, make_fleet_state, recompute_load
from routing.placement import NO_SCORES, NOWHERE, PLACEMENT, CandidateOrder, place
from routing.policy import RoutingPolicy, best_scored, make_routing, to_routing_request
from routing.scores import MOST_LOADED, score_replicas
from simulation.core.engine import Engines
from simulation.core.loop import Simulation
from simulation.dispatchers.planner import StatelessDispatcher


@njit(cache=True)
def refresh(fleet_state: FleetState, engines: Engines, seen: np.ndarray, now_s: float) -> None:
    """Bring the sums up to date with the tables; ``seen`` (i8[R]) are the iterations they were made at."""
    for r in range(len(fleet_state.replicas)):
        engine, replica = engines.state[r], fleet_state.replicas[r]
        busy = engine["count"] > 0 and engine["free_at_s"] < math.inf
        replica["free_at_s"] = max(now_s, engine["free_at_s"]) if busy else now_s
        if engine["iterations"] != seen[r] or engine["count"] != replica["count"]:
            replica["count"], seen[r] = engine["count"], engine["iterations"]
            recompute_load(fleet_state, r)


class EngineMirrors:
    """Mirrors that read the modelled engines' own tables instead of a copy."""

    def __init__(self) -> None:
        self._fleet_state: FleetState | None = None
        self._seen = np.zeros(0, dtype=np.int64)

    def at(self, simulation: Simulation) -> FleetState:
        """Up to date with the present tables (they move when they grow)."""
        engines = simulation.engines
        if self._fleet_state is None or self._fleet_state.tables is not engines.tables:
            replicas, slots = engines.tokens.shape
            fleet_state = make_fleet_state(replicas, 1)
            fleet_state.replicas["is_open"], fleet_state.replicas["count"] = True, -1
            self._fleet_state = fleet_state._replace(
                tables=engines.tables,
                forecasts=np.zeros((replicas, slots), dtype=fleet_state.forecasts.dtype),
                coefs=engines.planner_coefs,
                pessimistic_coefs=engines.planner_coefs,
                limits=engines.limits,
            )
            self._seen = np.full(replicas, -1)
        refresh(self._fleet_state, engines, self._seen, simulation.now_s)
        return self._fleet_state


@njit(cache=True)
def least_busy(engines: Engines) -> int:
    """The replica with the fewest requests; ties to the lower index."""
    best = 0
    for r in range(1, len(engines.state)):
        if engines.state[r]["count"] < engines.state[best]["count"]:
            best = r
    return best


class KernelDispatcher(StatelessDispatcher):
    """Exact admission where a rule of ``routing.scores`` wants it; what fits nowhere is served best effort.

    By default the load gradient: the live default's rule keeps all replicas busy, and their replays take several times
    as long over hundreds of thousands of requests.
    """

    def __init__(self, rule: int = MOST_LOADED, max_hops: int = 8) -> None:
        self.rule, self.max_hops, self._fleet_state = rule, max_hops, EngineMirrors()

    def dispatch(self, simulation: Simulation, which: np.ndarray) -> None:
        rows = simulation.rows(which)
        hopeless = rows[simulation.has_missed(which)]
        to_best_effort(hopeless)
        rows[simulation.has_missed(which)] = hopeless
        asking = np.flatnonzero(~rows["best_effort"])
        if len(asking):
            fleet_state, placements = self._fleet_state.at(simulation), np.zeros(len(asking), dtype=PLACEMENT)
            order = CandidateOrder(NO_SCORES, self.rule, self.max_hops)
            place(fleet_state, rows[asking], simulation.now_s, order, placements)
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
class BalancerDispatcher(StatelessDispatcher):
    """No admission: a routing policy's first choice takes the request as it asked. Calls of a program follow its
    first one where ``keeps_programs``."""

    policy: str = "round_robin"
    seed: int = 0
    turn: int = 0
    keeps_programs: bool = False
    router: RoutingPolicy = field(init=False)

    def __post_init__(self) -> None:
        self.router, self._rng = make_routing(self.policy), np.random.default_rng(self.seed)
        self._fleet_state, self._homes = EngineMirrors(), dict[int, int]()

    def dispatch(self, simulation: Simulation, which: np.ndarray) -> None:
        for row in simulation.rows(which):
            target = self._homes.get(int(row["program"])) if self.keeps_programs else None
            if target is None:
                target = self._choose(simulation, row)
                self._homes[int(row["program"])] = target
            simulation.place(row, target)

    def _choose(self, simulation: Simulation, row: np.void) -> int:
        if len(simulation.engines.state) == 1:
            return 0
        self.turn += 1
        replicas = self._fleet_state.at(simulation).replicas
        scores = self.router.score(to_routing_request(row), replicas, self.turn, self._rng)
        if not len(scores):
            scores = score_replicas(self._fleet_state.at(simulation), row, simulation.now_s, self.router.rule)
        return int(best_scored(replicas, scores))
