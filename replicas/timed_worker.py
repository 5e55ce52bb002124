"""A worker of vLLM's that computes nothing (``replicas.timed_device``). Imports vllm, which loads it by name.

Every rank of an engine is such a worker. The one that vLLM asks for outputs, the first of the last stage, keeps the
time of the whole pipeline; the others take part in what vLLM tells all of them.
"""

import time
from typing import Any

import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

from replicas.timed_batches import LAYOUT, TimedBatches


class DueOutput(AsyncModelRunnerOutput):
    """The output of a batch, which vLLM's thread for outputs waits for until the batch is done."""

    def __init__(self, output: ModelRunnerOutput, due_s: float) -> None:
        self._output, self._due_s = output, due_s

    def get_output(self) -> ModelRunnerOutput:
        time.sleep(max(0.0, self._due_s - time.monotonic()))
        return self._output


class TimedWorker(WorkerBase):
    """One rank of an engine over timed devices."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        del self.device  # vLLM's thread for outputs would choose it
        self._batches = TimedBatches(self.vllm_config)
        self._formed = DueOutput(EMPTY_MODEL_RUNNER_OUTPUT, 0.0)
        parallel = self.parallel_config
        self._answers = self.rank == parallel.world_size - parallel.tensor_parallel_size

    def init_device(self) -> None:
        torch.set_num_threads(1)

    def load_model(self, *, load_dummy_weights: bool = False) -> None: ...

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        return self._batches.kv_cache_spec

    def determine_available_memory(self) -> int:
        return self._batches.available_bytes

    def get_supported_kv_cache_layouts(self) -> list[str]:
        return [LAYOUT]

    def set_kv_cache_layout(self, kv_cache_layout: str) -> None: ...

    def initialize_from_config(self, kv_cache_config: Any) -> None: ...

    def compile_or_warm_up_model(self) -> CompilationTimes:
        return CompilationTimes(0.0, 0.0)

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        if scheduler_output.total_num_scheduled_tokens == 0:
            self._batches.forget(scheduler_output)
            return EMPTY_MODEL_RUNNER_OUTPUT
        if self._answers:
            self._formed = DueOutput(*self._batches.run(scheduler_output))
        return None

    def sample_tokens(self, grammar_output: Any) -> AsyncModelRunnerOutput:
        return self._formed
