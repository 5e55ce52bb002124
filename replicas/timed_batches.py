"""Adapter: vLLM's batches as a timed device takes them, and its outputs as vLLM's workers give them. Imports vllm."""

import time

import msgspec
import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

from replicas.request_rows import KEY, emitted_elsewhere
from replicas.timed_device import Share, TimedDevice, TimedSettings

TIMED = "timed"  # of additional_config[KEY]
LAYOUT = "NHD"  # of a KV cache that nobody allocates


class TimedBatches:
    """One timed device and what it knows of vLLM's requests."""

    def __init__(self, config: VllmConfig) -> None:
        self._settings = msgspec.convert(config.additional_config[KEY][TIMED], TimedSettings)
        self._device = TimedDevice(self._settings, np.random.default_rng())
        self._prompts: dict[str, int] = {}  # tokens of each request's prompt
        self._proposing: list[str] = []
        speculation = config.speculative_config
        self._drafts = speculation.num_speculative_tokens if speculation else 0
        self._block_tokens = config.cache_config.block_size
        self._spec = FullAttentionSpec(block_size=self._block_tokens, num_kv_heads=1, head_size=1, dtype=torch.float32)

    @property
    def kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        return {"timed": self._spec}

    @property
    def available_bytes(self) -> int:
        """Of the capacity in blocks, and of the one that vLLM keeps for itself."""
        blocks = self._settings.kv_capacity_tokens // self._block_tokens + 1
        return int(blocks * self._spec.page_size_bytes)

    def run(self, scheduled: SchedulerOutput) -> tuple[ModelRunnerOutput, float]:
        """Queue a batch: what it emits, and when it will be done."""
        shares = self._follow(scheduled)
        names = [share.request_id for share in shares]
        sampled = [self._device.emit(share) for share in shares]
        self._proposing = [name for name, tokens in zip(names, sampled, strict=True) if tokens]
        output = ModelRunnerOutput(names, {name: place for place, name in enumerate(names)}, sampled)
        return output, self._device.run_s(shares, time.monotonic())

    def propose(self) -> DraftTokenIds:
        """What a drafter proposes to verify next: always as many tokens as it may."""
        return DraftTokenIds(self._proposing, [self._device.propose(name, self._drafts) for name in self._proposing])

    def forget(self, scheduled: SchedulerOutput) -> None:
        """Forget requests whose end comes with a batch, even an empty one: vLLM tells it once."""
        for name in scheduled.finished_req_ids:
            self._device.end_stream(name)
            self._prompts.pop(name, None)

    def _follow(self, scheduled: SchedulerOutput) -> list[Share]:
        """What a batch is to every request in it; requests that begin, resume or have ended are noted."""
        self.forget(scheduled)
        positions = {}  # computed and known tokens
        for new in scheduled.scheduled_new_reqs:
            prompt, known = new.prompt_token_ids or [], new.prefill_token_ids or new.prompt_token_ids or []
            self._prompts[new.req_id] = len(prompt)
            self._device.begin_stream(new.req_id, prompt, emitted_elsewhere(new.sampling_params))
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
