"""The options of a fleet as one of its controllers has them. Pure."""

import msgspec

from controller.options import FleetOptions
from protocol.shards import LEADER


def of_shard(options: FleetOptions, shard: int) -> FleetOptions:
    """The options with a random sequence and a place for checkpoints of the shard's own; the leader has the fleet's."""
    if shard == LEADER:
        return options
    checkpoints = options.checkpoints
    if checkpoints.uri:
        checkpoints = msgspec.structs.replace(checkpoints, uri=f"{checkpoints.uri.rstrip('/')}/shard-{shard}")
    return msgspec.structs.replace(options, seed=options.seed + shard, checkpoints=checkpoints)
