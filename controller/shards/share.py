"""What one of several controllers has of bounds that hold for the whole fleet. Pure."""

from typing import NamedTuple

import msgspec

from controller.scaling.signals import ScalingOptions
from controller.scaling.tiers import NO_REPLICAS, Tier, TierTable


class Share(NamedTuple):
    """Place ``place`` among ``parts`` controllers."""

    place: int = 0
    parts: int = 1

    @property
    def is_whole(self) -> bool:
        return self.parts == 1

    def of(self, total: int) -> int:
        """This part of a number that all parts together make up; the first ones have one more."""
        return split(total, self.parts)[self.place]

    def of_table(self, table: TierTable) -> TierTable:
        """The table with this part of every bound."""
        if self.is_whole:
            return table
        return msgspec.structs.replace(table, tiers=tuple(map(self._of_tier, table.tiers)))

    def _of_tier(self, tier: Tier) -> Tier:
        own, low = self.of(tier.num_replicas), self.of(tier.min_replicas)
        high = self.of(tier.max_replicas) if tier.max_replicas else 0
        if (tier.num_replicas and not own) or (tier.max_replicas and not high):
            high = NO_REPLICAS
        return msgspec.structs.replace(tier, num_replicas=own, min_replicas=low, max_replicas=high)

    def of_scaling(self, options: ScalingOptions | None) -> ScalingOptions | None:
        """The bounds of the fleet's size with this part of each."""
        if options is None or self.is_whole:
            return options
        bounds = {name: self.of(getattr(options, name)) for name in ("min_replicas", "max_replicas", "warm_spares")}
        return msgspec.structs.replace(options, **bounds)


WHOLE = Share()


def split(total: int, parts: int) -> list[int]:
    """``total`` in parts that differ by one at most."""
    each, rest = divmod(total, parts)
    return [each + (i < rest) for i in range(parts)]
