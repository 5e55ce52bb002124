"""How fast the fleet's open replicas are, for what programs take. Pure."""

from dataclasses import dataclass

from controller.mirror.slots import ReplicaSlots
from planning.programs.deadlines import LEAST_S
from planning.programs.load import WorkCosts, work_costs
from profiles.kernels import iteration_s, token_s
from protocol.programs import INF

PACE_S = 1.0  # between two looks
TYPICAL_KV_TOKENS = 4096.0  # that a decode reads on an idle engine


NO_COSTS = WorkCosts(0.0, 0.0, 0.0, 0.0)


@dataclass
class FleetSpeed:
    """Seen at most once a second."""

    slots: ReplicaSlots
    _looked_s: float = -INF
    _paces: tuple[float, float] = (LEAST_S, 0.0)
    _costs: WorkCosts = NO_COSTS

    def paces(self, now_s: float) -> tuple[float, float]:
        """Seconds per output token and per prompt token on the fastest open replica, if it is idle."""
        self._look(now_s)
        return self._paces

    def costs(self, now_s: float) -> WorkCosts:
        """What requests take on a busy replica, the mean of the open ones."""
        self._look(now_s)
        return self._costs

    def _look(self, now_s: float) -> None:
        if now_s - self._looked_s <= PACE_S:
            return
        state = self.slots.fleet_state
        coefs = state.coefs[state.replicas["is_open"]]
        each = [(float(iteration_s(c, 1.0, TYPICAL_KV_TOKENS, 0.0, 1.0, 0.0)), float(token_s(c))) for c in coefs]
        self._looked_s, self._paces = now_s, min(each, default=(LEAST_S, 0.0))
        if len(coefs):
            self._costs = work_costs(coefs.mean(axis=0))
