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

    def of(self, total: int, first: int = 0) -> int:
        """This part of a number that all parts together make up; those from place ``first`` on have one more."""
        return split(total, self.parts)[(self.place - first) % self.parts]

    def of_table(self, table: TierTable) -> TierTable:
        """The table with this part of every bound. Minimums are dealt one after the other, so that all of them together
        are as even as the replicas that are to keep them; after them the maximums of tiers that have no minimum."""
        if self.is_whole:
            return table
        tiers, dealt, then_dealt = list[Tier](), 0, sum(tier.low for tier in table.tiers)
        for tier in table.tiers:
            tiers.append(self._of_tier(tier, dealt if tier.low else then_dealt))
            dealt += tier.low
            then_dealt += 0 if tier.low else tier.max_replicas
        return msgspec.structs.replace(table, tiers=tuple(tiers))

    def _of_tier(self, tier: Tier, first: int) -> Tier:
        own, low = self.of(tier.num_replicas, first), self.of(tier.min_replicas, first)
        high = self.of(tier.max_replicas, first) if tier.max_replicas else 0
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
