"""A vLLM engine core stepped by hand, to measure iterations of a chosen composition. Imports vllm.

The engine is configured like a replica's and lives in this process. Compositions are made with ordinary requests:
decodes are prompts that were prefilled before, the cached context of a chunk is a prefix-cache hit, and what the
scheduler really did is read from its output.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import llvmlite.binding.ffi
import msgspec
import numpy as np
import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import Executor, UniProcExecutor

from profiles.batch import Batch
from profiles.grid import DECODE_STEPS, TRIES, EngineLimits, Stage
from profiles.measured import Sample
from replicas.config import ReplicaConfig
from replicas.kv_room import to_groups, told_capacity
from replicas.vllm_codec import greedy_request
from replicas.vllm_settings import engine_config

# vLLM looks at __dict__ of everything in every module; llvmlite's library object takes that for a C function's name.
llvmlite.binding.ffi.lib._fntab["__dict__"] = {}


class EngineError(RuntimeError):
    """The engine did not do what the measurement needs."""


class ProfilingEngine:
    """vLLM's engine core with a recorder around its scheduler. Binds this process to ``config.cores``."""

    def __init__(self, config: ReplicaConfig) -> None:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", config.log_level)
        if config.cores:
            os.sched_setaffinity(0, config.cores)
            torch.set_num_threads(len(config.cores))
        vllm_config = engine_config(_with_stock_scheduler(config), link="")
        single = vllm_config.parallel_config.world_size == 1
        executor = UniProcExecutor if single else Executor.get_class(vllm_config)
        self._core = EngineCore(vllm_config, executor, log_stats=False)
        self._recorder = _Recorder(self._core.scheduler)
        self._vocabulary = vllm_config.model_config.get_vocab_size()
        self._random = np.random.default_rng(0)
        self._serial = 0
        cache, batches = vllm_config.cache_config, vllm_config.scheduler_config
        groups = to_groups(self._core.get_kv_cache_group_metadata(), batches.max_num_batched_tokens)
        self.limits = EngineLimits(
            kv_capacity_tokens=told_capacity(cache.num_gpu_blocks, batches.watermark, groups),
            max_model_tokens=vllm_config.model_config.max_model_len,
            max_batch_tokens=batches.max_num_batched_tokens,
            max_sequences=batches.max_num_seqs,
            block_tokens=cache.block_size,
        )

    def measure(self, stage: Stage) -> Iterator[Sample]:
        """One sample of every chunk of ``stage``, and one of the decodes alone before each of them.

        Decodes run alone for a few iterations between chunks, as they do while serving; the last one is sampled, when
        the caches no longer hold the chunk's data and nothing of the chunk is in flight.
        """
        held = [self._add(self._slot_prompt(slot, stage.kv_tokens_each)) for slot in range(stage.decode_seqs)]
        try:
            while any(self._is_prefilling(request_id) for request_id in held):
                self._step()
            for chunk_tokens, cached_tokens in self._random.permutation(np.array(stage.chunks)).tolist():
                if held:
                    yield [self._step() for _ in range(DECODE_STEPS)][-1]
                if chunk_tokens:
                    yield self._chunk(chunk_tokens, cached_tokens, len(held))
        finally:
            self._abort(held)

    def close(self) -> None:
        """End the engine and give its memory back."""
        self._core.shutdown()

    def _chunk(self, chunk_tokens: int, cached_tokens: int, decode_seqs: int) -> Sample:
        """The iteration in which a prompt of which ``cached_tokens`` are in the prefix cache is prefilled at once."""
        context = self._slot_prompt(-1, cached_tokens)
        asked = (decode_seqs + 1, chunk_tokens, cached_tokens)
        for _ in range(TRIES):
            earlier = len(self._recorder.samples)
            request_id = self._add([*context, *self._tokens(chunk_tokens)])
            while self._is_prefilling(request_id):
                self._step()
            self._abort([request_id])
            for sample in self._recorder.samples[earlier:]:
                batch = sample.batch
                if (batch.sequences, batch.prefill_tokens, batch.cached_tokens) == asked:
                    return sample
        raise EngineError(
            f"no iteration of {decode_seqs} decodes and {chunk_tokens} tokens on {cached_tokens} cached ones"
        )

    def _add(self, prompt: list[int]) -> str:
        self._serial += 1
        request_id = f"profile-{self._serial}"
        longest = self.limits.max_model_tokens - len(prompt)
        request = greedy_request(request_id, prompt, longest)
        self._core.add_request(*self._core.preprocess_add_request(request))
        return request_id

    def _step(self) -> Sample:
        """Run until one more iteration has finished (with asynchronous scheduling one more is in flight then)."""
        finished = len(self._recorder.samples)
        while len(self._recorder.samples) == finished:
            _, executed = self._core.step_fn()
            self._core.post_step(executed)
            if not self._core.scheduler.has_requests():
                raise EngineError("the engine ran out of requests: a decode ended before its measurement")
        return self._recorder.samples[-1]

    def _is_prefilling(self, request_id: str) -> bool:
        request = self._core.scheduler.requests[request_id]
        return not request.num_output_tokens

    def _abort(self, request_ids: list[str]) -> None:
        self._core.abort_requests(request_ids)

    def _slot_prompt(self, slot: int, length: int) -> list[int]:
        """The same tokens for a slot every time, so that longer prompts find shorter ones in the prefix cache."""
        random = np.random.default_rng([7, slot + 1])
        return [int(token) for token in random.integers(self._vocabulary, size=length)]

    def _tokens(self, count: int) -> list[int]:
        return [int(token) for token in self._random.integers(self._vocabulary, size=count)]


def _with_stock_scheduler(config: ReplicaConfig) -> ReplicaConfig:
    return msgspec.structs.replace(config, engine_kwargs=config.engine_kwargs | {"scheduler_cls": None})


class _Recorder:
    """Wraps a scheduler's two entry points: composition when an iteration is planned, time when it is done.

    An iteration takes from its own planning, or from the end of the one before when that was still in flight, until
    the scheduler has digested its output.
    """

    def __init__(self, scheduler: Any) -> None:
        self.samples: list[Sample] = []
        self._scheduler = scheduler
        self._in_flight: list[tuple[Batch, float, float]] = []
        self._done_s = self._done_cpu_s = 0.0
        self._schedule, self._update = scheduler.schedule, scheduler.update_from_output
        scheduler.schedule, scheduler.update_from_output = self.schedule, self.update_from_output

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        started_s, started_cpu_s = time.perf_counter(), time.process_time()
        output = self._schedule(*args, **kwargs)
        self._in_flight.append((self._composition(output), started_s, started_cpu_s))
        return output

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        result = self._update(*args, **kwargs)
        done_s, done_cpu_s = time.perf_counter(), time.process_time()
        batch, started_s, started_cpu_s = self._in_flight.pop(0)
        if batch.batch_tokens:
            seconds, cpu_s = done_s - max(started_s, self._done_s), done_cpu_s - max(started_cpu_s, self._done_cpu_s)
            self.samples.append(Sample(batch, seconds, cpu_s))
        self._done_s, self._done_cpu_s = done_s, done_cpu_s
        return result

    def _composition(self, output: SchedulerOutput) -> Batch:
        drafted = output.scheduled_spec_decode_tokens
        kv_tokens, most_drafts, prefill = 0, 0, Batch(0.0, sequences=0.0)
        for request_id, tokens in output.num_scheduled_tokens.items():
            request = self._scheduler.requests[request_id]
            cached, drafts = request.num_computed_tokens - tokens, len(drafted.get(request_id, ()))
            if request.num_output_tokens + request.num_output_placeholders > 0 and tokens == 1 + drafts:
                kv_tokens += cached + tokens
                most_drafts = max(most_drafts, drafts)
            else:
                prefill = prefill.with_chunk(tokens, cached)
        return prefill._replace(
            batch_tokens=float(output.total_num_scheduled_tokens),
            kv_tokens=float(kv_tokens),
            sequences=float(len(output.num_scheduled_tokens)),
            spec_steps=float(most_drafts),
        )
