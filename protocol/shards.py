"""Several controllers for one fleet (PolyServe section 5.6): each has its part of the replicas, the first one leads."""

import msgspec

LEADER = 0  # the shard that agrees with the others on totals


class ShardReport(msgspec.Struct, frozen=True, array_like=True):
    """What a shard tells the leader, twice a second."""

    shard: int
    replicas: int  # that report to it, and are to stay


class Part(msgspec.Struct, frozen=True, array_like=True):
    """A shard's part of what Serve says of the fleet's size (``controller.scaling.signals.Serve``)."""

    replicas: int
    running: int
    deployed: float
    unplaced: int
    moves: int = 0  # how often parts were cut anew because a shard came or went, and not because somebody set a size
    hands: int = 0  # how often somebody set the fleet's size by hand


class ShardOrders(msgspec.Struct, frozen=True, array_like=True):
    """What the leader answers."""

    place: int  # among the live shards, in order of their numbers
    parts: int  # live shards, between which all bounds are divided
    give: tuple[tuple[int, int], ...] = ()  # to a shard, so many replicas
    size: Part | None = None  # none: the size is fixed, or Serve has not said yet


def shard_name(controller: str, shard: int) -> str:
    """Name of a shard's actor; the leader has the controller's own."""
    return controller if shard == LEADER else f"{controller}.shard-{shard}"
