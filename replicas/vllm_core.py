"""What a replica calls by name in its engine's process. Imports vllm, and adds to its ``EngineCore``."""

from vllm.v1.engine.core import EngineCore


def _configure(self: EngineCore, policy: str, options: dict[str, float]) -> None:
    self.scheduler.polyslo_configure(policy, options)


EngineCore.polyslo_configure = _configure  # the one name by which a run-time change reaches the scheduler
