"""What a replica calls by name in its engine's process. Imports vllm, and adds to its ``EngineCore``."""

from types import SimpleNamespace
from typing import Any

from vllm.v1.engine.core import EngineCore

from replicas.kv_room import KvGroup, to_groups


def groups_of(scheduler: Any) -> tuple[KvGroup, ...]:
    """The KV-cache groups of a scheduler, as the engine core would tell them."""
    core: Any = SimpleNamespace(scheduler=scheduler)
    return to_groups(EngineCore.get_kv_cache_group_metadata(core), scheduler.max_num_scheduled_tokens)


def _configure(self: EngineCore, policy: str, options: dict[str, float]) -> None:
    self.scheduler.polyslo_configure(policy, options)


EngineCore.polyslo_configure = _configure  # the one name by which a run-time change reaches the scheduler
