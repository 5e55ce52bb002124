"""When drained replicas may be ended."""

from controller.disaggregation.phases import LINGER_S, Phase
from controller.scaling.draining import Drained
from controller.scaling.role import ReplicaView


def test_a_draining_replica_that_vanishes_is_forgotten() -> None:
    """It may come back under its name, and drain again."""
    drained = Drained()
    view = ReplicaView("a", (0,), phase=Phase.DECODE)
    for began_s in (0.0, 1000.0):
        drained.begin("a", began_s)
        assert drained.ended(["a"], {"a": view}, 300.0, began_s) == (), "its KV caches may still be fetched"
        assert drained.ended(["a"], {"a": view}, 300.0, began_s + LINGER_S) == ("a",)
        assert drained.ended([], {}, 300.0, began_s + LINGER_S + 1.0) == ()
        assert not drained._since_s
