"""The tier table: who is in it, where a request belongs, how many replicas each tier may have."""

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from protocol.messages import INF, Slo
from routing.fleet_state import SHARED

NO_REPLICAS = -1  # as ``max_replicas``: it may have none at all, which is a shard's share of a small number


class Tier(msgspec.Struct, frozen=True):
    """A class of service.

    ``num_replicas`` is an exact number of them to itself (0: none said). Where roles are dynamic, ``min_replicas`` and
    ``max_replicas`` bound the number it may have at a time (no maximum: 0).
    """

    name: str
    ttft_s: float = INF
    tpot_s: float = INF
    e2e_s: float = INF
    best_effort: bool = False
    num_replicas: int = 0
    min_replicas: int = 0
    max_replicas: int = 0
    unattainable: str = ""  # "best_effort" or "refuse"; empty: as the fleet does
    output_tokens: int = 0  # prior of the output length; 0: the fleet's
    confidence: float = 0.95  # share of its promises that must be kept
    value: float = 1.0  # what one attained request is worth
    ttft_slowdown: float = 0.0  # TTFT as a multiple of an idle engine's, by prompt (``controller.slowdown``); 0: none

    @property
    def low(self) -> int:
        """Fewest replicas it has."""
        return self.num_replicas or self.min_replicas

    @property
    def high(self) -> float:
        """Most replicas it may have; inf without a bound."""
        return max(0, self.num_replicas or self.max_replicas) if self.num_replicas or self.max_replicas else INF


def _tightness(tier: Tier) -> tuple[bool, float, float, float, str]:
    """By which tiers are ordered, tightest first."""
    return tier.best_effort, tier.tpot_s, tier.ttft_s, tier.ttft_slowdown or INF, tier.name


class TierTable(msgspec.Struct, frozen=True):
    """Tiers from tightest TPOT to loosest, best effort last; ``version`` orders tables that ingresses forward."""

    version: int
    tiers: tuple[Tier, ...]

    def __post_init__(self) -> None:
        names = [tier.name for tier in self.tiers]
        if len(set(names)) < len(names):
            raise ValueError(f"tiers: names must differ, got {names}")

    @classmethod
    def of(cls, version: int, tiers: Sequence[Tier]) -> "TierTable":
        return cls(version, tuple(sorted(tiers, key=_tightness)))

    @property
    def pool(self) -> int:
        """Position of the best-effort tier, and of every replica that serves best effort only; the last there is."""
        return sum(not tier.best_effort for tier in self.tiers)

    @property
    def best_effort_name(self) -> str:
        """What the tier is called that serves what nobody promises."""
        return next((tier.name for tier in self.tiers if tier.best_effort), "best_effort")

    @property
    def length_priors(self) -> dict[str, float]:
        """Expected output lengths of the tiers that state one."""
        return {tier.name: float(tier.output_tokens) for tier in self.tiers if tier.output_tokens}

    @property
    def values(self) -> NDArray[np.float64]:
        """What one attained request of each tier is worth, and of none (the last entry)."""
        return np.array([*(tier.value for tier in self.tiers), 1.0])

    def value(self, position: int) -> float:
        """One of ``values``."""
        return self.tiers[position].value if 0 <= position < len(self.tiers) else 1.0

    @property
    def asks_for_roles(self) -> bool:
        """Whether a tier bounds its replicas, which only moving them can keep."""
        return any(tier.min_replicas or tier.max_replicas for tier in self.tiers)

    def unattainable(self, position: int, otherwise: str) -> str:
        """What a tier does with what it cannot attain; ``otherwise``: what is done where it says nothing."""
        return (self.tiers[position].unattainable if self.tiers else "") or otherwise

    def refuses(self, position: int, otherwise: str) -> bool:
        """Whether a tier refuses what it cannot attain."""
        return self.unattainable(position, otherwise) == "refuse"

    def find(self, name: str) -> int | None:
        """Position of the tier called ``name``, if there is one."""
        for i, tier in enumerate(self.tiers):
            if tier.name == name:
                return i
        return None

    def bin(self, tpot_s: float) -> int:
        """Position of the loosest tier not looser than ``tpot_s``; the tightest where all are (PolyServe section 4.2).

        Where the tier of a request was removed, this is the next tighter one.
        """
        promising = range(self.pool)
        return next((i for i in reversed(promising) if self.tiers[i].tpot_s <= tpot_s), 0)

    def of_request(self, slo: Slo) -> int:
        """Position of a request's tier: by name, else by what is promised to it."""
        position = self.find(slo.tier)
        if position is None:
            return max(0, len(self.tiers) - 1) if slo.best_effort else self.bin(slo.tpot_s)
        return position

    def tier_remap(self, other: "TierTable") -> NDArray[np.int64]:
        """Position in ``other`` of every tier of this table, and of none (-1, the last entry)."""
        found = [other.of_request(Slo(tpot_s=t.tpot_s, tier=t.name, best_effort=t.best_effort)) for t in self.tiers]
        return np.array([*found, -1])

    def assign(self, replicas: Sequence[str]) -> dict[str, int]:
        """Static assignment, replica name to tier position: tightest tiers take theirs first, the rest is shared."""
        wanted = [i for i, tier in enumerate(self.tiers) for _ in range(tier.num_replicas)]
        return {name: wanted[k] if k < len(wanted) else SHARED for k, name in enumerate(sorted(replicas))}
