"""What a routing policy is, and the registry by which the configuration names one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Protocol

import numpy as np

SHARED = -1  # the tier of a replica that serves every tier


@dataclass(frozen=True)
class Candidate:
    """One live replica as routing sees it; ``tier`` is a position in the tier table, tightest first."""

    index: int
    tier: int
    requests: int  # running and waiting
    best_effort: int  # of those, best effort
    kv_free_tokens: float  # capacity less what its requests are predicted to hold at their peak
    backlog_tokens: float  # prompt tokens not computed yet


@dataclass(frozen=True)
class Ask:
    """One request as routing sees it."""

    tier: int
    prompt_tokens: int
    best_effort: bool


class RoutingPolicy(Protocol):
    """Orders the replicas that a request may try, most wanted first. Pure: randomness comes as ``rng``."""

    checks_admission: bool  # whether a candidate must attain the SLO, or is taken as it comes

    def order(self, ask: Ask, candidates: Sequence[Candidate], turn: int, rng: np.random.Generator) -> list[int]:
        """Indices of replicas to try, in order; ``turn`` counts the requests routed so far."""
        ...


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
        near = get_close_matches(name, known, 1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"unknown routing policy {name!r}{hint}; known: {', '.join(known)}")
    return _REGISTRY[name]()
