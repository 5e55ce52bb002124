"""How an ingress has Ray start a controller. Knows Ray."""

from typing import Any

import ray

from controller.actor import Controller
from controller.options import OUTLIVING
from controller.upgrade import CONTROLLER_PACKAGES, code_id
from controller.warmup import warm_up
from protocol.shards import LEADER, shard_name


def start_controller(name: str, namespace: str, shard: int = LEADER, started_by: int = 0) -> Any:
    """The handle of a controller's shard, made if it does not live yet; kernels are compiled before it answers.

    ``started_by``: number of the deploy of who asks for it.
    """
    actor = ray.remote(Controller)
    return actor.options(name=shard_name(name, shard), namespace=namespace, **OUTLIVING).remote(
        shard=shard, name=name, namespace=namespace, started_by=started_by
    )


def prepare() -> str:
    """Fill the cache of kernels, and tell what code a controller has that starts here."""
    warm_up()
    return code_id(*CONTROLLER_PACKAGES)
