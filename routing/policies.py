"""The routing policies. Ties go to the lower position, so that equal inputs give equal answers."""

import numpy as np

from routing.fleet_state import SHARED, SHORTEST_S
from routing.policy import Checked, RoutingRequest, Unchecked, register
from routing.scores import LEAST_ADDED

COPIES = 4  # K of ``power_of_k``


def in_turn(replicas: np.ndarray, turn: int) -> np.ndarray:
    """Scores of the open replicas in turn."""
    scores, usable = np.full(len(replicas), -np.inf), np.flatnonzero(replicas["is_open"])
    if len(usable):
        scores[usable] = -((np.arange(len(usable)) - turn) % len(usable))
    return scores


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

    def score(self, request: RoutingRequest, replicas: np.ndarray, turn: int, rng: np.random.Generator) -> np.ndarray:
        return -replicas["load"]


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


@register("round_robin")
class RoundRobinRouting(Unchecked):
    """The next replica, whatever its state: what a plain load balancer does."""

    def score(self, request: RoutingRequest, replicas: np.ndarray, turn: int, rng: np.random.Generator) -> np.ndarray:
        return in_turn(replicas, turn)


@register("random")
class RandomRouting(Unchecked):
    """Any replica with equal chance."""

    def score(self, request: RoutingRequest, replicas: np.ndarray, turn: int, rng: np.random.Generator) -> np.ndarray:
        return rng.random(len(replicas))


@register("least_loaded")
class LeastLoadedRouting(Unchecked):
    """The replica with the fewest requests."""

    def score(self, request: RoutingRequest, replicas: np.ndarray, turn: int, rng: np.random.Generator) -> np.ndarray:
        return -replicas["count"].astype(np.float64)


@register("power_of_two")
class PowerOfTwoRouting(Unchecked):
    """The less loaded of two replicas drawn at random."""

    def score(self, request: RoutingRequest, replicas: np.ndarray, turn: int, rng: np.random.Generator) -> np.ndarray:
        scores, usable = np.full(len(replicas), -np.inf), np.flatnonzero(replicas["is_open"])
        drawn = rng.permutation(usable)[:2]
        scores[drawn] = -replicas["count"][drawn].astype(np.float64)
        return scores


@register("power_of_k")
class PowerOfK(Unchecked):
    """Concord section 4.3: K replicas drawn at random, of which the one where the request has the highest priority
    takes it.

    Priority is goodput per second of generating (equation 4.1), which differs between replicas by the time alone. In
    the paper K copies wait and the first scheduler to reach one takes it; bound at arrival, the prompt tokens ahead
    stand for that wait.
    """

    def score(self, request: RoutingRequest, replicas: np.ndarray, turn: int, rng: np.random.Generator) -> np.ndarray:
        scores = np.full(len(replicas), -np.inf)
        drawn = rng.permutation(np.flatnonzero(replicas["is_open"]))[:COPIES]
        of = replicas[drawn]
        wait_s = (of["backlog_tokens"] + request.prompt_tokens) * of["prompt_token_s"]
        scores[drawn] = 1.0 / np.maximum(wait_s + request.output_tokens * of["step_s"], SHORTEST_S)
        return scores


@register("lmetric")
class LMetric(Unchecked):
    """The least product of new prefill tokens and batch size: LMetric (OSDI 2026), which has nothing to tune.

    New are the tokens that wait to be computed there with the request's own; the batch size counts it too.
    """

    def score(self, request: RoutingRequest, replicas: np.ndarray, turn: int, rng: np.random.Generator) -> np.ndarray:
        return -(replicas["backlog_tokens"] + request.prompt_tokens) * (replicas["count"] + 1.0)


@register("remaining_memory")
class RemainingMemory(Unchecked):
    """The replica with the largest remaining memory, as SLO-aware scheduling assigns instances (section 4.4).

    Remaining are the tokens of equation 20 less prompts and predicted outputs of what was assigned. Where not even the
    largest holds the request, every memory counts once more, as the paper's fresh round does.
    """

    def score(self, request: RoutingRequest, replicas: np.ndarray, turn: int, rng: np.random.Generator) -> np.ndarray:
        usable, taken = replicas["usable_tokens"], replicas["peak_tokens"]
        rounds = np.ceil((taken + request.prompt_tokens + request.output_tokens) / np.maximum(usable, 1.0))
        usual = rounds[replicas["is_open"]]
        return (usual.min() if len(usual) else 1.0) * usable - taken


@register("minimal_iteration_time")
class MinimalIterationTime(Unchecked):
    """The lowest cycle time, prompts that wait included: PolyServe's ``Minimal`` baseline (section 5.1)."""

    def score(self, request: RoutingRequest, replicas: np.ndarray, turn: int, rng: np.random.Generator) -> np.ndarray:
        return -(replicas["step_s"] + replicas["backlog_tokens"] * replicas["prompt_token_s"])


@register("predicted_headroom")
class PredictedHeadroom(Unchecked):
    """The most loaded replica that is not predicted to be full, else the least loaded; nothing is refused (llm-d)."""

    def score(self, request: RoutingRequest, replicas: np.ndarray, turn: int, rng: np.random.Generator) -> np.ndarray:
        load: np.ndarray = replicas["load"]
        return np.where(load < 1.0, load, -load)
