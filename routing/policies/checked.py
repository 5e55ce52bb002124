"""Policies whose choice must attain the SLO."""

import numpy as np

from routing.fleet_state import SHARED
from routing.policy import Checked, RoutingRequest, in_turn, register
from routing.scores import LEAST_ADDED, LEAST_LOADED


@register("load_gradient")
class LoadGradient(Checked):
    """PolyServe section 4.2: the most loaded replica that attains the SLO, so that others stay free for tight ones."""

    def score(self, request: RoutingRequest, replicas: np.ndarray, turn: int, rng: np.random.Generator) -> np.ndarray:
        return np.zeros(0)


@register("marginal_load")
class MarginalLoad(Checked):
    """The replica whose squared load grows least, of those that attain the SLO (``routing.scores``)."""

    rule = LEAST_ADDED

    def score(self, request: RoutingRequest, replicas: np.ndarray, turn: int, rng: np.random.Generator) -> np.ndarray:
        return np.zeros(0)


@register("balanced")
class Balanced(Checked):
    """The least loaded replica that attains the SLO: the most room for what predictions miss, and none left empty."""

    rule = LEAST_LOADED

    def score(self, request: RoutingRequest, replicas: np.ndarray, turn: int, rng: np.random.Generator) -> np.ndarray:
        return np.zeros(0)


@register("silos")
class Silos(Checked):
    """A static fleet per tier, the baseline of PolyServe section 5.2: no promotion to tighter tiers, nothing shared.

    Inside a silo the fewest requests first. A tier without replicas of its own has those that are no tier's; best
    effort without either fills all silos.
    """

    def score(self, request: RoutingRequest, replicas: np.ndarray, turn: int, rng: np.random.Generator) -> np.ndarray:
        silo = replicas["tier"] == request.tier
        if not silo.any():
            silo = (replicas["tier"] == SHARED) & replicas["is_open"]
        if request.best_effort and not silo.any():
            silo[:] = True
        return np.where(silo, -replicas["count"].astype(np.float64), -np.inf)


@register("sequential")
class SequentialRouting(Checked):
    """SLOs-Serve section 4.2: a round-robin first replica, then the next one sequentially."""

    def score(self, request: RoutingRequest, replicas: np.ndarray, turn: int, rng: np.random.Generator) -> np.ndarray:
        return in_turn(replicas, turn)
