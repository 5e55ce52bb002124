"""The tier table and its static assignment to replicas."""

from collections.abc import Sequence

import msgspec

from routing.policy import SHARED

INF = float("inf")


class Tier(msgspec.Struct, frozen=True):
    """A class of service. ``replicas`` dedicates that many to it (0: it shares all undedicated ones)."""

    name: str
    ttft_s: float = INF
    tpot_s: float = INF
    e2e_s: float = INF
    best_effort: bool = False
    replicas: int = 0
    unattainable: str = ""  # "best_effort" or "refuse"; empty: as the fleet does
    output_tokens: int = 0  # prior of the output length; 0: the fleet's


class TierTable(msgspec.Struct, frozen=True):
    """Tiers from tightest TPOT to loosest, best effort last; ``version`` orders tables that several doors forward."""

    version: int
    tiers: tuple[Tier, ...]

    def __post_init__(self) -> None:
        names = [tier.name for tier in self.tiers]
        if len(set(names)) < len(names):
            raise ValueError(f"tiers: names must differ, got {names}")

    @classmethod
    def of(cls, version: int, tiers: Sequence[Tier]) -> "TierTable":
        return cls(version, tuple(sorted(tiers, key=lambda t: (t.best_effort, t.tpot_s, t.ttft_s, t.name))))

    def index(self, name: str) -> int:
        """Position of a tier; one that is no longer in the table counts as the loosest."""
        return next((i for i, tier in enumerate(self.tiers) if tier.name == name), len(self.tiers) - 1)

    def assign(self, replicas: Sequence[str]) -> dict[str, int]:
        """Static assignment, replica name to tier position: tightest tiers take theirs first, the rest is shared."""
        wanted = [i for i, tier in enumerate(self.tiers) for _ in range(tier.replicas)]
        return {name: wanted[k] if k < len(wanted) else SHARED for k, name in enumerate(sorted(replicas))}
