"""The routing policies. Ties go to the lower index, so that equal inputs give equal answers."""

from collections.abc import Sequence

import numpy as np

from routing.policy import SHARED, Ask, Candidate, register


def eligible(ask: Ask, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Replicas of the request's own tier, then shared ones, then tighter tiers from the nearest.

    A looser tier's replica is never offered: its iterations are longer than the request's TPOT allows.
    """

    def rank(candidate: Candidate) -> int:
        if candidate.tier == ask.tier:
            return 0
        return 1 if candidate.tier == SHARED else 1 + ask.tier - candidate.tier

    usable = [c for c in candidates if c.tier == SHARED or c.tier <= ask.tier]
    return sorted(usable, key=rank)


def _rotate(indices: list[int], turn: int) -> list[int]:
    start = turn % len(indices) if indices else 0
    return indices[start:] + indices[:start]


@register("slo")
class SequentialRouting:
    """SLOs-Serve section 4.2: a round-robin first replica, then the next one sequentially, tier group by tier group."""

    checks_admission = True

    def order(self, ask: Ask, candidates: Sequence[Candidate], turn: int, rng: np.random.Generator) -> list[int]:
        if ask.best_effort:
            return [c.index for c in sorted(candidates, key=lambda c: (c.backlog_tokens, c.requests, c.index))]
        groups: dict[int, list[int]] = {}
        for candidate in eligible(ask, candidates):
            groups.setdefault(candidate.tier, []).append(candidate.index)
        return [index for group in groups.values() for index in _rotate(group, turn)]


@register("round_robin")
class RoundRobinRouting:
    """The next replica, whatever its state: what a plain load balancer does."""

    checks_admission = False

    def order(self, ask: Ask, candidates: Sequence[Candidate], turn: int, rng: np.random.Generator) -> list[int]:
        return _rotate([c.index for c in candidates], turn)


@register("random")
class RandomRouting:
    """Any replica with equal chance."""

    checks_admission = False

    def order(self, ask: Ask, candidates: Sequence[Candidate], turn: int, rng: np.random.Generator) -> list[int]:
        return [candidates[i].index for i in rng.permutation(len(candidates))]


@register("least_loaded")
class LeastLoadedRouting:
    """The replica with the fewest requests."""

    checks_admission = False

    def order(self, ask: Ask, candidates: Sequence[Candidate], turn: int, rng: np.random.Generator) -> list[int]:
        return [c.index for c in sorted(candidates, key=lambda c: (c.requests, c.index))]


@register("power_of_two")
class PowerOfTwoRouting:
    """The less loaded of two replicas drawn at random."""

    checks_admission = False

    def order(self, ask: Ask, candidates: Sequence[Candidate], turn: int, rng: np.random.Generator) -> list[int]:
        drawn = [candidates[i] for i in rng.permutation(len(candidates))[:2]]
        return [c.index for c in sorted(drawn, key=lambda c: (c.requests, c.index))]
