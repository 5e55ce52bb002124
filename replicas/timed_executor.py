"""vLLM's executor over a device that only keeps time (``replicas.timed_device``). Imports vllm and torch.

Everything else of the engine is vLLM's own: its process, client, scheduler, KV manager, prefix cache and asynchronous
scheduling. No weights are loaded and no KV cache is allocated.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgspec
import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.executor import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, DraftTokenIds, ModelRunnerOutput

from replicas.request_rows import EMITTED, KEY
from replicas.timed_device import Share, TimedDevice, TimedSettings
from replicas.vllm_executor import die_with_parent

TIMED = "timed"  # of additional_config[KEY]


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
        settings = self.vllm_config.additional_config[KEY][TIMED]
        self._settings = msgspec.convert(settings, TimedSettings)
        self._device = TimedDevice(self._settings, np.random.default_rng())
        self._prompts: dict[str, int] = {}  # tokens of each request's prompt
        self._formed = DueResult(EMPTY_MODEL_RUNNER_OUTPUT, 0.0)
        speculation = self.speculative_config
        self._drafts = speculation.num_speculative_tokens if speculation else 0
        torch.set_num_threads(1)

    def get_kv_cache_specs(self) -> list[dict[str, KVCacheSpec]]:
        block_tokens = self.cache_config.block_size
        spec = FullAttentionSpec(block_size=block_tokens, num_kv_heads=1, head_size=1, dtype=torch.float32)
        self._page_bytes = spec.page_size_bytes
        return [{"timed": spec}]

    def determine_available_memory(self) -> list[int]:
        """Of the capacity in blocks, and of the one that vLLM keeps for itself."""
        blocks = self._settings.kv_capacity_tokens // self.cache_config.block_size + 1
        return [blocks * self._page_bytes]

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        return [["NHD"]]

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
            result: Future = Future()
            result.set_result(EMPTY_MODEL_RUNNER_OUTPUT)
            return result if non_block else EMPTY_MODEL_RUNNER_OUTPUT
        shares = self._follow(scheduler_output)
        names = [share.request_id for share in shares]
        sampled = [self._device.emit(share) for share in shares]
        self._proposing = [name for name, tokens in zip(names, sampled, strict=True) if tokens]
        output = ModelRunnerOutput(names, {name: place for place, name in enumerate(names)}, sampled)
        self._formed = DueResult(output, self._device.run_s(shares, time.monotonic()))
        nothing: Future = Future()
        nothing.set_result(None)
        return nothing if non_block else None

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        return self._formed if non_block else self._formed.result()

    def take_draft_token_ids(self) -> DraftTokenIds:
        """What a drafter proposes to verify next: always as many tokens as it may."""
        return DraftTokenIds(self._proposing, [self._device.propose(name, self._drafts) for name in self._proposing])

    def _follow(self, scheduled: SchedulerOutput) -> list[Share]:
        """What a batch is to every request in it; requests that begin, resume or have ended are noted."""
        for name in scheduled.finished_req_ids:
            self._device.end_stream(name)
            self._prompts.pop(name, None)
        positions = {}  # computed and known tokens
        for new in scheduled.scheduled_new_reqs:
            prompt, known = new.prompt_token_ids or [], new.prefill_token_ids or new.prompt_token_ids or []
            self._prompts[new.req_id] = len(prompt)
            self._device.begin_stream(new.req_id, prompt, _emitted_elsewhere(new.sampling_params))
            self._device.resume_stream(new.req_id, len(known) - len(prompt))
            positions[new.req_id] = (new.num_computed_tokens, len(known))
        cached = scheduled.scheduled_cached_reqs
        for place, name in enumerate(cached.req_ids):
            made = cached.num_output_tokens[place]
            if name in cached.resumed_req_ids:
                self._device.resume_stream(name, made)
            positions[name] = (cached.num_computed_tokens[place], self._prompts[name] + made)
        drafted = scheduled.scheduled_spec_decode_tokens
        return [
            Share(name, tokens, *positions[name], len(drafted.get(name, ())))
            for name, tokens in scheduled.num_scheduled_tokens.items()
        ]


class TetheredTimedExecutor(TimedExecutor):
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


def keep_in_flight(config: VllmConfig, steps: int) -> None:
    """Have EngineCore form ``steps`` batches before it waits for the first.

    The CPU platform has the last word on asynchronous scheduling when a configuration is made, so this comes after.
    """
    config.scheduler_config.async_scheduling = steps > 1
    config.__class__ = DeepVllmConfig


def _emitted_elsewhere(params: Any) -> int:
    """Tokens at the end of the prompt that another replica emitted."""
    objective = (getattr(params, "extra_args", None) or {}).get(KEY)
    return int(objective[EMITTED]) if objective else 0
