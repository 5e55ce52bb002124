"""One kind of replicas with everything that they inherit, and what each reserves in Ray."""

import math
from dataclasses import dataclass
from typing import Any

from serving.config.engine import EngineConfig
from serving.config.parallel import LEAST, total, with_replica

DEPLOYMENT = "Replica"  # Serve deployment of the replicas; with the names of model and group behind, where there are
SEES_GPUS = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}  # a process that asks about them but reserves none


@dataclass(frozen=True)
class Group:
    """Replicas of one kind with everything that they inherit; ``name`` is empty where the fleet has only one kind."""

    name: str
    num_replicas: int
    profile: str
    engine: EngineConfig
    accelerator_type: str = ""
    resources: dict[str, float] | None = None
    phase: str = ""
    model: str = ""  # among several of one application

    def __post_init__(self) -> None:
        if self.num_replicas % self.engine.per_process:
            whose = f" of group {self.name!r}" if self.name else ""
            told = f"{self.engine.per_process} does not divide the {self.num_replicas} replicas{whose}"
            raise ValueError(f"engine.per_process: {told}")

    @property
    def num_processes(self) -> int:
        """Replicas of Serve's, each of which hosts ``per_process`` of ours."""
        return self.num_replicas // self.engine.per_process

    @property
    def deployment(self) -> str:
        """Name of its Serve deployment."""
        return "-".join(filter(None, (DEPLOYMENT, self.model, self.name)))

    @property
    def actor_options(self) -> dict[str, Any]:
        """What the actor of each replica reserves in Ray, beside its workers where those have bundles of their own."""
        options: dict[str, Any] = {"num_cpus": self.engine.num_cpus, "num_gpus": self.engine.parallelism.gpus}
        if self.engine.parallelism.is_placed:
            options |= {"num_gpus": 0, "runtime_env": {"env_vars": SEES_GPUS}}
        elif self.accelerator_type:
            options["accelerator_type"] = self.accelerator_type
        return options | ({"resources": dict(self.resources)} if self.resources else {})

    @property
    def bundles(self) -> list[dict[str, float]]:
        """What a placement group of each replica holds; empty where its actor is all that there is."""
        if not self.engine.parallelism.is_placed:
            return []
        kind = {f"accelerator_type:{self.accelerator_type}": LEAST} if self.accelerator_type else {}
        own = {"CPU": self.engine.num_cpus, **(self.resources or {})}
        return with_replica(self.engine.parallelism.workers, own, kind)

    @property
    def placement(self) -> dict[str, Any]:
        """Options of its Serve deployment that say where the bundles go."""
        if not (bundles := self.bundles):
            return {}
        strategy = self.engine.placement_group_strategy or "PACK"
        return {"placement_group_bundles": bundles, "placement_group_strategy": strategy}

    @property
    def reserved(self) -> dict[str, float]:
        """What one replica reserves in Ray, everything together."""
        own = {"CPU": self.engine.num_cpus, "GPU": self.engine.parallelism.gpus, **(self.resources or {})}
        return total(self.bundles) or own

    @property
    def threads(self) -> int:
        """Threads of an engine on a CPU."""
        return max(1, math.ceil(self.engine.num_cpus))
