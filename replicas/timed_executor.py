"""vLLM's executor over a device that only keeps time (``replicas.timed_device``). Imports vllm and torch.

Everything else of the engine is vLLM's own: its process, client, scheduler, KV manager, prefix cache and asynchronous
scheduling. No weights are loaded and no KV cache is allocated.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.executor import Executor
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, DraftTokenIds, ModelRunnerOutput

from replicas.request_rows import KEY
from replicas.timed_batches import LAYOUT, TIMED, TimedBatches
from replicas.vllm_executor import LaunchTimes, die_with_parent


class DueResult(Future):
    """The output of a batch, which waits in ``result`` until the batch is done."""

    def __init__(self, output: ModelRunnerOutput, due_s: float) -> None:
        super().__init__()
        self._due_s = due_s
        self.set_result(output)

    def done(self) -> bool:
        return time.monotonic() >= self._due_s

    def result(self, timeout: float | None = None) -> Any:
        time.sleep(max(0.0, self._due_s - time.monotonic()))
        return super().result(timeout)


class TimedExecutor(Executor):
    """One timed device in EngineCore's own process."""

    def _init_executor(self) -> None:
        self._batches = TimedBatches(self.vllm_config)
        self._formed = DueResult(EMPTY_MODEL_RUNNER_OUTPUT, 0.0)
        torch.set_num_threads(1)

    def get_kv_cache_specs(self) -> list[dict[str, KVCacheSpec]]:
        return [self._batches.kv_cache_spec]

    def determine_available_memory(self) -> list[int]:
        return [self._batches.available_bytes]

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        return [[LAYOUT]]

    def set_kv_cache_layout(self, layout_name: str) -> None: ...

    def initialize_from_config(self, kv_cache_configs: Any) -> None: ...

    def compile_or_warm_up_model(self) -> None: ...

    def check_health(self) -> None: ...

    def shutdown(self) -> None: ...

    supported_tasks = ("generate",)

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        return True

    def collective_rpc(
        self, method: str | Callable, timeout: Any = None, args: Any = (), kwargs: Any = None, non_block: bool = False
    ) -> Any:
        """Whatever vLLM asks of its workers beyond this class: there are none, and nothing to do."""
        return [None]

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        """Queue the batch and decide what it emits; its output is had of ``sample_tokens``."""
        if scheduler_output.total_num_scheduled_tokens == 0:
            self._batches.forget(scheduler_output)
            result: Future = Future()
            result.set_result(EMPTY_MODEL_RUNNER_OUTPUT)
            return result if non_block else EMPTY_MODEL_RUNNER_OUTPUT
        self._formed = DueResult(*self._batches.run(scheduler_output))
        nothing: Future = Future()
        nothing.set_result(None)
        return nothing if non_block else None

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        return self._formed if non_block else self._formed.result()

    def take_draft_token_ids(self) -> DraftTokenIds:
        return self._batches.propose()


class TetheredTimedExecutor(LaunchTimes, TimedExecutor):
    """Ends with the thread that started its process, as the executors of real devices do."""

    def _init_executor(self) -> None:
        die_with_parent()
        super()._init_executor()


class DeepVllmConfig(VllmConfig):
    """A configuration by which EngineCore keeps as many batches in flight as the device is told, not as vLLM would."""

    @property
    def max_concurrent_batches(self) -> int:
        steps: int = self.additional_config[KEY][TIMED]["steps_in_flight"]
        return steps

    @property
    def use_v2_model_runner(self) -> bool:
        """As on a GPU, for a pipeline: its decodes take turns."""
        return self.parallel_config.pipeline_parallel_size > 1 or super().use_v2_model_runner

    def _validate_v2_model_runner(self) -> None:
        """No model runs here, so nothing is asked of the machine for it."""


def keep_in_flight(config: VllmConfig, steps: int) -> None:
    """Have EngineCore form ``steps`` batches before it waits for the first.

    The CPU platform has the last word on asynchronous scheduling when a configuration is made, so this comes after.
    """
    config.scheduler_config.async_scheduling = steps > 1
    config.__class__ = DeepVllmConfig
