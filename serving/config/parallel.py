"""How many devices one engine spans, and what each of them is to Ray: the bundles of a replica's placement group.

Pure. The keys have the names of Ray Serve; what is not stated follows from vLLM's sizes and the device.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from serving.config.devices import Device

Bundle = dict[str, float]
Strategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]
TENSOR, PIPELINE = "tensor_parallel_size", "pipeline_parallel_size"
BUNDLES, STRATEGY = "placement_group_bundles", "placement_group_strategy"
LEAST = 0.001  # of a resource that only says where something goes


@dataclass(frozen=True)
class Parallelism:
    """One engine's devices, as its section states them."""

    device: Device
    num_gpus: float  # as stated; 0 where the bundles say it
    tensor: int
    pipeline: int
    bundles: Sequence[Bundle]
    strategy: str

    @property
    def parts(self) -> int:
        """Devices of one engine."""
        return self.tensor * self.pipeline

    @property
    def is_placed(self) -> bool:
        """Whether the engine's workers are Ray's actors, each in a bundle; otherwise they are its own processes."""
        if len(self.bundles) == 1 and self.device == "gpu":
            return False
        return bool(self.bundles or self.strategy or (self.device == "gpu" and self.pipeline > 1))

    @property
    def gpus(self) -> float:
        """GPUs of one engine."""
        return gpus_of(self.num_gpus, self.bundles)

    @property
    def workers(self) -> list[Bundle]:
        """What each worker reserves, as stated or one device each."""
        own: Bundle = {"GPU": 1.0} if self.device == "gpu" else {"CPU": 1.0}
        return [dict(each) for each in self.bundles] or [dict(own) for _ in range(self.parts)]

    @property
    def product(self) -> str:
        return f"{TENSOR} {self.tensor} x {PIPELINE} {self.pipeline}"

    def check(self) -> None:
        """Raise ``ValueError`` naming the key that contradicts the others."""
        placing = BUNDLES if self.bundles else STRATEGY if self.strategy else ""
        if self.device == "simulated" and placing:
            raise ValueError(f"{placing}: the simulated engine is one process; set kind: vllm")
        if self.device == "cpu" and placing:
            raise ValueError(f"{placing}: an engine on a CPU runs on one node; set num_gpus or device: timed")
        if self.device == "cpu" and self.pipeline > 1:
            raise ValueError(f"engine_kwargs.{PIPELINE}: an engine on a CPU has one stage; set num_gpus")
        if self.device == "gpu":
            self._check_gpus()
        if self.device == "timed" and self.bundles:
            self._check_timed()

    def _check_gpus(self) -> None:
        has = sum(each.get("GPU", 0.0) for each in self.bundles)
        if self.bundles and self.num_gpus and self.num_gpus != has:
            raise ValueError(f"num_gpus: {self.num_gpus:g}, but {BUNDLES} have {has:g} GPUs; state it once")
        if self.gpus != self.parts and not (self.parts == 1 and self.gpus < 1):
            field = BUNDLES if self.bundles else "num_gpus"
            raise ValueError(f"{field}: {self.product} needs {self.parts} GPUs, got {self.gpus:g}")
        for place, each in enumerate(self.bundles):
            if len(self.bundles) > 1 and each.get("GPU", 0.0) != 1:
                raise ValueError(f"{BUNDLES}.{place}: one of several has exactly 1 GPU, got {each.get('GPU', 0):g}")

    def _check_timed(self) -> None:
        if len(self.bundles) != self.parts:
            raise ValueError(f"{BUNDLES}: {self.product} needs {self.parts} bundles, got {len(self.bundles)}")
        for place, each in enumerate(self.bundles):
            if not each.get("CPU"):
                raise ValueError(f"{BUNDLES}.{place}: a timed device is placed by its CPU; give it some")


def parallel_sizes(engine_kwargs: Mapping[str, Any]) -> tuple[int, int]:
    """Tensor and pipeline parallelism of an engine; what is no number is for vLLM's own parser to refuse."""
    return _size(engine_kwargs.get(TENSOR)), _size(engine_kwargs.get(PIPELINE))


def _size(value: Any) -> int:
    text = str(value or 1)
    return max(1, int(text)) if text.isdigit() else 1


def gpus_of(num_gpus: float, bundles: Sequence[Bundle]) -> float:
    """GPUs of an engine, where either is stated."""
    return num_gpus or sum(each.get("GPU", 0.0) for each in bundles)


def with_replica(workers: Sequence[Bundle], replica: Bundle, everywhere: Bundle) -> list[Bundle]:
    """Bundles of a placement group: the replica's actor is in the first one, beside a worker, as Ray Serve wants it."""
    merged = [everywhere | each for each in workers]
    for name, amount in replica.items():
        merged[0][name] = merged[0].get(name, 0.0) + amount
    return [{name: amount for name, amount in each.items() if amount} for each in merged]


def total(bundles: Sequence[Bundle]) -> Bundle:
    """Resources of all bundles together."""
    return {name: sum(each.get(name, 0.0) for each in bundles) for name in {name for each in bundles for name in each}}


def misfit(bundles: Sequence[Bundle], strategy: str, nodes: Sequence[Mapping[str, float]]) -> str:
    """Why no placement group of ``bundles`` can be made on ``nodes`` (the resources of each); empty where one can.

    Takes every node as empty, so that it names only what can never be.
    """
    if strategy == "STRICT_PACK":
        bundles = [total(bundles)]
    for each in bundles:
        if not any(_holds(node, each) for node in nodes):
            return f"needs one node with {said(each)}; the cluster has none"
    if strategy == "STRICT_SPREAD" and len(nodes) < len(bundles):
        return f"needs {len(bundles)} nodes, one for each bundle; the cluster has {len(nodes)}"
    return ""


def _holds(node: Mapping[str, float], bundle: Bundle) -> bool:
    return all(node.get(name, 0.0) >= amount or math.isclose(amount, LEAST) for name, amount in bundle.items())


def said(bundle: Bundle) -> str:
    """A bundle in words."""
    return ", ".join(f"{amount:g} {name}" for name, amount in sorted(bundle.items()) if amount)
