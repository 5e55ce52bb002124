"""Policies that take a replica as it comes: the field's balancers, for comparison."""

import numpy as np

from routing.fleet_state import SHORTEST_S
from routing.policy import RoutingRequest, Unchecked, in_turn, register

COPIES = 4  # K of ``power_of_k``


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

    New are the tokens that wait to be computed there with those of the request that the replica does not hold; the
    batch size counts it too.
    """

    counts_held = True

    def score(self, request: RoutingRequest, replicas: np.ndarray, turn: int, rng: np.random.Generator) -> np.ndarray:
        held_tokens = 0.0 if request.held_tokens is None else request.held_tokens
        new_tokens = np.maximum(request.prompt_tokens - held_tokens, 1.0)
        return -(replicas["backlog_tokens"] + new_tokens) * (replicas["count"] + 1.0)


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
