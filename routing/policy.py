"""What a routing policy is, and the registry by which the configuration names one."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from profiles.suggest import suggest
from routing.scores import MOST_LOADED


@dataclass(frozen=True)
class RoutingRequest:
    """One request as routing sees it; ``tier`` is a position in the tier table, tightest first."""

    tier: int
    prompt_tokens: int  # those it resumes after included
    output_tokens: int = 1  # that are predicted to come
    best_effort: bool = False
    held_tokens: np.ndarray | None = None  # f8[R], of its prompt, that each replica presumably holds; None: nobody does


def to_routing_request(row: np.void | np.ndarray, held_tokens: np.ndarray | None = None) -> RoutingRequest:
    """A planning row (REQUEST[]) as routing sees it; ``held_tokens`` (f8[R]) may be empty for nothing held."""
    emitted_tokens = int(row["emitted_tokens"])
    output_tokens = max(1, int(row["output_tokens"]) - emitted_tokens)
    prompt_tokens, held = int(row["prompt_tokens"]) + emitted_tokens, held_tokens
    if held is not None and not len(held):
        held = None
    return RoutingRequest(int(row["tier"]), prompt_tokens, output_tokens, bool(row["best_effort"]), held)


class RoutingPolicy(Protocol):
    """Says how well each replica suits a request. Pure: randomness comes as ``rng``."""

    checks_admission: bool  # whether the replica must attain the SLO, or is taken as it comes
    rule: int  # of ``routing.scores``, for what it leaves unsaid
    counts_held: bool  # its scores count what replicas hold of the prompt: no affinity is added to them

    def score(self, request: RoutingRequest, replicas: np.ndarray, turn: int, rng: np.random.Generator) -> np.ndarray:
        """How well each of ``replicas`` suits the request (REPLICA_STATE[R] to f8[R]), -inf for not at all.

        Closed replicas are passed over whatever is said of them. An empty answer leaves it to ``rule`` at the
        time of placement. Where admission is checked, replicas are tried group by group
        (``routing.placement.tier_distance``) and by score inside a group; ``turn`` counts the requests routed so
        far.
        """
        ...


class Checked:
    """A replica takes a request if it attains the SLO."""

    checks_admission = True
    rule = MOST_LOADED
    counts_held = False


class Unchecked:
    """A replica takes a request whatever that does."""

    checks_admission = False
    rule = MOST_LOADED
    counts_held = False


_REGISTRY: dict[str, Callable[[], RoutingPolicy]] = {}


def register(name: str) -> Callable[[Callable[[], RoutingPolicy]], Callable[[], RoutingPolicy]]:
    """Make a policy known by ``name``; a duplicate raises ``ValueError``."""

    def add(factory: Callable[[], RoutingPolicy]) -> Callable[[], RoutingPolicy]:
        if name in _REGISTRY:
            raise ValueError(f"routing policy {name!r} is registered twice")
        _REGISTRY[name] = factory
        return factory

    return add


def routing_names() -> list[str]:
    """Names of all policies, sorted."""
    import routing.policies  # noqa: F401  (registers them)

    return sorted(_REGISTRY)


def make_routing(name: str) -> RoutingPolicy:
    """The policy called ``name``; ``ValueError`` lists the known ones."""
    known = routing_names()
    if name not in _REGISTRY:
        raise ValueError(f"routing: no policy {name!r}; {suggest(name, known)}")
    return _REGISTRY[name]()


def in_turn(replicas: np.ndarray, turn: int) -> np.ndarray:
    """Scores of the open replicas in turn."""
    scores, usable = np.full(len(replicas), -np.inf), np.flatnonzero(replicas["is_open"])
    if len(usable):
        scores[usable] = -((np.arange(len(usable)) - turn) % len(usable))
    return scores


def best_scored(replicas: np.ndarray, scores: np.ndarray) -> int:
    """The open replica with the highest score, ties to the lower position; -1 where all scores are -inf."""
    scores = np.where(replicas["is_open"], scores, -np.inf)
    best = int(np.argmax(scores)) if len(scores) else -1
    return best if best >= 0 and scores[best] > -np.inf else -1


def idlest(replicas: np.ndarray, held_tokens: np.ndarray | None = None) -> np.ndarray:
    """Scores of best effort: the fewest prompt tokens ahead, then the fewest requests, then reserved replicas.

    ``held_tokens`` (f8[R], or empty) of its own prompt need not be computed there.
    """
    ahead = replicas["backlog_tokens"]
    if held_tokens is not None and len(held_tokens):
        ahead = ahead - held_tokens
    by_wait = np.lexsort((replicas["tier"], replicas["count"], ahead))
    scores = np.empty(len(replicas))
    scores[by_wait] = -np.arange(len(replicas))
    return scores
