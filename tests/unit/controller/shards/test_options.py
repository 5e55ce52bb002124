"""What a shard has of the fleet's options: a random sequence and a place for checkpoints of its own."""

import pytest

from controller.options import CheckpointOptions, FleetOptions
from controller.shards.options import of_shard
from controller.storage import Storage


def test_each_shard_has_checkpoints_of_its_own() -> None:
    options = FleetOptions(checkpoints=CheckpointOptions("file:///kept/"), seed=3)
    assert of_shard(options, 0) == options
    other = of_shard(options, 2)
    assert (other.checkpoints.uri, other.seed) == ("file:///kept/shard-2", 5)
    assert of_shard(FleetOptions(), 2).checkpoints.uri == ""


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("s3://kept/all/?scheme=http&endpoint_override=minio:9000", "kept/all/shard-1"),
        ("/kept/why?", "/kept/why?/shard-1"),
    ],
)
def test_a_shards_checkpoints_lie_below_the_path_of_a_uri_not_in_its_options(uri: str, expected: str) -> None:
    own = of_shard(FleetOptions(checkpoints=CheckpointOptions(uri)), 1).checkpoints.uri
    assert Storage(own)._root == expected
