"""The routing policies. Ties go to the lower position, so that equal inputs give equal answers."""

import numpy as np

from routing.policy import Ask, register


def in_turn(replicas: np.ndarray, turn: int) -> np.ndarray:
    """Preference of the open replicas in turn."""
    wants, usable = np.full(len(replicas), -np.inf), np.flatnonzero(replicas["is_open"])
    if len(usable):
        wants[usable] = -((np.arange(len(usable)) - turn) % len(usable))
    return wants


@register("load_gradient")
class LoadGradient:
    """PolyServe section 4.2: the most loaded replica that attains the SLO, so that others stay free for tight ones."""

    checks_admission = True

    def prefer(self, ask: Ask, replicas: np.ndarray, turn: int, rng: np.random.Generator) -> np.ndarray:
        return np.zeros(0)


@register("balanced")
class Balanced:
    """The least loaded replica that attains the SLO: the most room for what predictions miss, and none left empty."""

    checks_admission = True

    def prefer(self, ask: Ask, replicas: np.ndarray, turn: int, rng: np.random.Generator) -> np.ndarray:
        return -replicas["load"]


@register("sequential")
class SequentialRouting:
    """SLOs-Serve section 4.2: a round-robin first replica, then the next one sequentially."""

    checks_admission = True

    def prefer(self, ask: Ask, replicas: np.ndarray, turn: int, rng: np.random.Generator) -> np.ndarray:
        return in_turn(replicas, turn)


@register("round_robin")
class RoundRobinRouting:
    """The next replica, whatever its state: what a plain load balancer does."""

    checks_admission = False

    def prefer(self, ask: Ask, replicas: np.ndarray, turn: int, rng: np.random.Generator) -> np.ndarray:
        return in_turn(replicas, turn)


@register("random")
class RandomRouting:
    """Any replica with equal chance."""

    checks_admission = False

    def prefer(self, ask: Ask, replicas: np.ndarray, turn: int, rng: np.random.Generator) -> np.ndarray:
        return rng.random(len(replicas))


@register("least_loaded")
class LeastLoadedRouting:
    """The replica with the fewest requests."""

    checks_admission = False

    def prefer(self, ask: Ask, replicas: np.ndarray, turn: int, rng: np.random.Generator) -> np.ndarray:
        return -replicas["count"].astype(np.float64)


@register("power_of_two")
class PowerOfTwoRouting:
    """The less loaded of two replicas drawn at random."""

    checks_admission = False

    def prefer(self, ask: Ask, replicas: np.ndarray, turn: int, rng: np.random.Generator) -> np.ndarray:
        wants, usable = np.full(len(replicas), -np.inf), np.flatnonzero(replicas["is_open"])
        drawn = rng.permutation(usable)[:2]
        wants[drawn] = -replicas["count"][drawn].astype(np.float64)
        return wants


@register("minimal_iteration_time")
class MinimalIterationTime:
    """The replica whose iterations are shortest now: PolyServe's ``Minimal`` baseline (section 5.1)."""

    checks_admission = False

    def prefer(self, ask: Ask, replicas: np.ndarray, turn: int, rng: np.random.Generator) -> np.ndarray:
        return -replicas["step_s"]


@register("predicted_headroom")
class PredictedHeadroom:
    """The most loaded replica that is not predicted to be full, else the least loaded; nothing is refused (llm-d)."""

    checks_admission = False

    def prefer(self, ask: Ask, replicas: np.ndarray, turn: int, rng: np.random.Generator) -> np.ndarray:
        load: np.ndarray = replicas["load"]
        return np.where(load < 1.0, load, -load)
