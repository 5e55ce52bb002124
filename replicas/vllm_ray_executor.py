"""vLLM's executor whose workers are Ray's actors in the bundles of the replica's placement group. Imports vllm and ray.

EngineCore is a process of the replica, so it joins the cluster as a driver of its own: when it ends, Ray ends its
workers, on whatever nodes they are.
"""

import os
from typing import Any

import ray
from vllm.config import ParallelConfig
from vllm.platforms import current_platform
from vllm.v1.executor import ray_executor_v2
from vllm.v1.executor.ray_executor_v2 import RayExecutorV2, RayWorkerProc

from replicas.vllm_executor import (
    LaunchTimes,
    compile_rest,
    die_with_parent,
    lock_progress_bars,
    make_llvmlite_scannable,
)


class TetheredRayExecutor(LaunchTimes, RayExecutorV2):
    """Ends with the replica, as the executors on one node do."""

    def _init_executor(self) -> None:
        if not os.environ.get("RAY_ADDRESS"):
            raise RuntimeError("RAY_ADDRESS: an engine over several nodes runs in a replica of Ray Serve")
        die_with_parent()
        lock_progress_bars()
        super()._init_executor()

    def compile_or_warm_up_model(self) -> None:
        super().compile_or_warm_up_model()
        self.collective_rpc(compile_rest)


class TimedWorkerProc(RayWorkerProc):
    """A worker that no GPU belongs to."""

    def get_node_and_physical_gpu_ids(self) -> tuple[str, list[int]]:
        return ray.get_runtime_context().get_node_id(), []

    def initialize_worker(self, *args: Any, **kwargs: Any) -> None:
        make_llvmlite_scannable()
        super().initialize_worker(*args, **kwargs)


class TimedRayExecutor(TetheredRayExecutor):
    """The same over ``replicas.timed_worker``: all of it is vLLM's but for what it asks of GPUs.

    It runs alone in its process, so what it changes there concerns no other engine.
    """

    def _init_executor(self) -> None:
        current_platform.ray_device_key = "CPU"  # by which bundles are found
        ray_executor_v2.RayWorkerProc = TimedWorkerProc
        ray_executor_v2.initialize_ray_cluster = _join_cluster
        super()._init_executor()

    @staticmethod
    def _get_actor_resource_kwargs() -> dict[str, Any]:
        return {"num_gpus": 0}

    def compile_or_warm_up_model(self) -> None:
        RayExecutorV2.compile_or_warm_up_model(self)


def _join_cluster(parallel: ParallelConfig, **_: Any) -> None:
    """vLLM's, without its count of GPUs."""
    ray.init(runtime_env=parallel.ray_runtime_env, log_to_driver=False)
