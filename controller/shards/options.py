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
        checkpoints = msgspec.structs.replace(checkpoints, uri=_below(checkpoints.uri, f"shard-{shard}"))
    return msgspec.structs.replace(options, seed=options.seed + shard, checkpoints=checkpoints)


def _below(uri: str, folder: str) -> str:
    """A folder of a storage; the options of a URI, which follow its path, stay its last part."""
    path, mark, options = (uri, "", "") if uri.startswith("/") else uri.partition("?")
    return f"{path.rstrip('/')}/{folder}{mark}{options}"
