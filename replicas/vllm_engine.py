"""A vLLM engine core, in a process group of its own, behind the ``Engine`` surface: token ids in, token ids out."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
from vllm.config import VllmConfig
from vllm.utils.network_utils import get_ip
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.core_client import AsyncMPClient, EngineCoreClient

from protocol.messages import Delta, Progress, Step, Submission
from replicas.config import ReplicaConfig
from replicas.cores import CoreClaim
from replicas.delivery import DeliveryTime
from replicas.engine import EngineFailure, EngineState, EngineTotals, LiveRequest, Pulse, owner_of
from replicas.engine_reports import LEARNT, IterationReport, IterationReportReceiver
from replicas.held_prefixes import HeldPrefixes
from replicas.kv_peer import KvPeer
from replicas.kv_room import METADATA, to_groups, told_capacity
from replicas.kv_transfer import ENGINES_ONLY, PARAMS, from_transfer, prefill_params
from replicas.logs import vllm_environment
from replicas.request_rows import to_extra_args
from replicas.scratch import ScratchFolder
from replicas.step_planner import reported_limits
from replicas.surroundings import environment
from replicas.timed_device import check_timed
from replicas.vllm_adapters import Adapters
from replicas.vllm_codec import decode_request, encode_output, handed_over
from replicas.vllm_core import own_options
from replicas.vllm_executor import CORES, PARENT, THREADS
from replicas.vllm_kv_events import KvEventReader
from replicas.vllm_settings import engine_config, engine_executor

STOP_S, KILLED_S = 1.0, 10.0  # an engine gets to end by itself before its group is killed, and then to be gone


class VllmEngine:
    """One vLLM engine core in a process of its own."""

    def __init__(self, config: ReplicaConfig) -> None:
        self.pids: tuple[int, ...] = ()
        self._config = config
        self._entries: dict[str, LiveRequest] = {}
        self._rejected, self._steps = list[Delta](), list[Step]()
        self.totals = EngineTotals()
        self.planning_s = 0.0  # spent on planning its iterations, since birth
        self._iterations = self._planner_failures = self._kv_used_tokens = self._kv_capacity_tokens = 0
        self._learnt: dict[str, float] = {}  # of its limits, as the engine told
        self._adapters = Adapters(config.lora_modules)
        self._block_tokens, self._steps_in_flight = config.block_size, 1
        self._own_options: Callable[[Mapping[str, float]], dict[str, float]] = dict
        self._max_running, self._max_batch_tokens = config.max_num_seqs, config.max_num_batched_tokens
        sizes = dict(block_tokens=config.block_size, max_batch_tokens=config.max_num_batched_tokens)
        self._limits = reported_limits(config.policy, config.policy_options, **sizes)
        self._alive_s = 0.0  # when the engine last finished an iteration, answered, or began to be busy
        self.asking: asyncio.Task[None] | None = None  # for a sign of life, after its last request was aborted
        self._client: Any = None  # AsyncMPClient, once started
        self._receiver: IterationReportReceiver | None = None
        self._events: KvEventReader | None = None
        self._peer = KvPeer(config)
        self._claim = CoreClaim(0 if config.cores or config.is_timed else config.num_threads)
        self._folder: ScratchFolder | None = None
        self._failure = ""
        self.delivery = DeliveryTime()
        # The kernel kills the engine when the thread that started it ends, so that thread is kept for it alone.
        self._starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine-starter")

    async def start(self) -> None:
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    async def _start(self) -> None:
        self._folder = ScratchFolder()
        ticks = os.path.join(self._folder.path, "ticks")
        self._receiver = IterationReportReceiver(ticks, self._on_tick)
        self._client = await asyncio.get_running_loop().run_in_executor(self._starter, self._launch, ticks)
        self.pids = tuple(process.pid for process in self._client.resources.engine_manager.processes)
        await self._adapters.load(self._client)
        self._note_sizes(self._client.vllm_config, await self._client.call_utility_async(METADATA))
        if self._config.tells_prefixes:
            self._events = KvEventReader(self._client.vllm_config.kv_events_config, self._block_tokens)
        self._alive_s = time.monotonic()

    def _launch(self, ticks: str) -> AsyncMPClient:
        self._peer.open(get_ip())
        surroundings = {
            PARENT: str(os.getpid()),
            CORES: ",".join(map(str, self._config.cores or self._claim.cores)),
            THREADS: str(len(self._config.cores) or self._config.num_threads),
            **vllm_environment(self._config),
            "TORCH_CPP_LOG_LEVEL": self._config.log_level,
            "PYTHONWARNINGS": "ignore",
            **self._peer.environment,
        }
        with environment(surroundings):
            vllm_config = engine_config(self._peer.config, ticks)
            return EngineCoreClient.make_async_mp_client(
                vllm_config=vllm_config,
                executor_class=engine_executor(self._config, vllm_config),
                log_stats=True,  # its scheduler tells of the prefix cache and of preemptions
            )

    async def submit(self, batch: Sequence[Submission]) -> None:
        now_s = time.monotonic()
        if not self._owes_life:
            self._alive_s = now_s
        for submission in batch:
            entry = LiveRequest(submission, now_s)
            try:
                request = self._adapters.given_to(to_request(submission, entry, self.delivery.most_s))
                if self._config.is_timed:
                    check_timed(request.sampling_params)
            except ValueError as error:
                self._rejected.append(Delta(submission.request_id, (), "error", str(error)))
                self._client.outputs_queue.put_nowait(EngineCoreOutputs())  # wakes the reader
                continue
            self._entries[submission.request_id] = entry
            await self._client.add_request_async(request)

    async def abort(self, request_ids: Sequence[str]) -> None:
        known = [request_id for request_id in request_ids if self._entries.pop(request_id, None)]
        if known and not self._failure:
            await self._client.abort_requests_async(known)
            if not self._owes_life:
                self.asking = asyncio.create_task(self._ask_for_life())

    @property
    def _owes_life(self) -> bool:
        """Whether a living engine will finish an iteration or answer soon."""
        return bool(self._entries) or (self.asking is not None and not self.asking.done())

    async def _ask_for_life(self) -> None:
        """An engine that stands still looks idle once its requests have moved; so it is asked for an answer."""
        with contextlib.suppress(Exception):  # its death is told to the reader of its outputs
            await self._client.get_supported_tasks_async()
            self._alive_s = time.monotonic()

    async def next_outputs(self) -> list[Delta]:
        try:
            outputs = await self._client.get_output_async()
        except Exception as error:
            self._failure = f"vLLM engine died: {error!r}"
            raise EngineFailure(self._failure) from error
        if outputs.outputs:  # and not only a rejected request, which no iteration has to do with
            self._alive_s = time.monotonic()
            self.delivery.record(self._alive_s - outputs.timestamp)
        record_stats(outputs, self.totals)
        deltas, self._rejected = self._rejected, []
        deltas += [self._to_delta(output) for output in outputs.outputs if output.request_id in self._entries]
        return deltas

    def _to_delta(self, output: Any) -> Delta:
        entry = self._entries[output.request_id]
        self.totals.record_output(entry, len(output.new_token_ids))
        entry.record_output(len(output.new_token_ids))
        if output.finished:
            del self._entries[output.request_id]
            if entry.submission.prefill_only and output.finish_reason == FinishReason.LENGTH:
                return handed_over(output, self._peer.told(output.request_id, output.kv_transfer_params))
        delta = encode_output(output)
        return msgspec.structs.replace(delta, late=True) if entry.late else delta

    def _on_tick(self, tick: IterationReport) -> None:
        self._alive_s = time.monotonic()
        self._iterations, self.planning_s = tick.steps, tick.planning_s
        self._kv_used_tokens, self._planner_failures = tick.kv_used_tokens, tick.planner_failures
        self._learnt = {name: getattr(tick, name) for name in LEARNT}
        self._limits = msgspec.structs.replace(self._limits, **self._learnt)
        self._steps.extend(tick.recent)
        for at in tick.requests or ():
            if entry := self._entries.get(at.request_id):
                entry.record_position(at.computed_tokens, at.running, at.late, at.settled_tokens)

    def state(self) -> EngineState:
        now_s = time.monotonic()
        requests = self._progress(now_s)
        return EngineState(
            steps=self._iterations,
            busy=bool(self._entries),
            iteration_age_s=now_s - self._alive_s if self._owes_life else 0.0,
            kv_capacity_tokens=self._kv_capacity_tokens,
            kv_used_tokens=self._kv_used_tokens,
            max_running=self._max_running,
            limits=self._limits,
            requests=requests,
            counts=self.totals.to_counts(requests),
            planner_failures=self._planner_failures,
            steps_in_flight=self._steps_in_flight,
        )

    def _progress(self, now_s: float) -> tuple[Progress, ...]:
        return tuple(entry.to_progress(now_s) for entry in self._entries.values())

    @property
    def held_prefixes(self) -> HeldPrefixes | None:
        return self._events.held if self._events else None

    def pulse(self) -> Pulse:
        return Pulse(self._iterations, bool(self._entries), sum(entry.load for entry in self._entries.values()))

    def take_steps(self) -> tuple[Step, ...]:
        steps, self._steps = tuple(self._steps), []
        return steps

    async def configure(self, policy: str, options: dict[str, float]) -> None:
        await self._client.call_utility_async("polyslo_configure", policy, options)
        self._note_policy(policy, options)

    def _note_sizes(self, made: VllmConfig, told: list[dict[str, Any]]) -> None:
        """What the started engine has, as its scheduler counts it."""
        self.vllm_config = made
        batches, blocks = made.scheduler_config, made.cache_config.num_gpu_blocks or 0
        self._block_tokens, self._own_options = made.cache_config.block_size, own_options(made)
        self._steps_in_flight = self._config.told_depth if batches.async_scheduling else 1
        self._max_running, self._max_batch_tokens = batches.max_num_seqs, batches.max_num_batched_tokens
        groups = to_groups(told, self._max_batch_tokens)
        self._kv_capacity_tokens = told_capacity(blocks, batches.watermark, groups, made.model_config.max_model_len)
        self._note_policy(self._config.policy, self._config.policy_options)

    def _note_policy(self, policy: str, options: dict[str, float]) -> None:
        """What the planner, which lives in the engine's process, keeps to from now on."""
        sizes = dict(block_tokens=self._block_tokens, max_batch_tokens=self._max_batch_tokens)
        told = reported_limits(policy, self._own_options(options), **sizes)
        self._limits = msgspec.structs.replace(told, **self._learnt)

    def check(self) -> None:
        if self._failure:
            raise EngineFailure(self._failure)
        if self._client is None or self._client.resources.engine_dead:
            raise EngineFailure("vLLM engine is not running")
        silent_s = time.monotonic() - self._alive_s
        if self._owes_life and silent_s > self._config.hang_s:
            raise EngineFailure(f"vLLM engine is busy but finished no iteration for {silent_s:.0f} s")

    async def stop(self) -> None:
        self._failure = self._failure or "vLLM engine was stopped"
        if self.asking is not None:
            self.asking.cancel()
        if self._client is not None:
            await asyncio.to_thread(self._client.shutdown, STOP_S)
            self._client.resources.ctx.destroy(linger=0)
            for pid in self.pids:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            for process in self._client.resources.engine_manager.processes:
                await asyncio.to_thread(process.join, KILLED_S)
        if self._events is not None:
            self._events.stop()
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None
        if self._folder is not None:
            self._folder.remove()
        self._claim.release()
        self._peer.close()
        self._starter.shutdown(wait=False)


def record_stats(outputs: EngineCoreOutputs, totals: EngineTotals) -> None:
    """Add what the scheduler tells beside the outputs of an iteration."""
    if outputs.scheduler_stats is not None:
        cache = outputs.scheduler_stats.prefix_cache_stats
        totals.prefix_queries += cache.queries
        totals.prefix_hits += cache.hits
    for output in outputs.outputs:
        totals.preemptions += sum(event.type == EngineCoreEventType.PREEMPTED for event in output.events or ())


def to_request(submission: Submission, entry: LiveRequest, delivery_s: float = 0.0) -> EngineCoreRequest:
    """vLLM's request of a submission, carrying its objective; raises ``ValueError`` when it cannot be one.

    The engine is to finish every token ``delivery_s`` before it is due, beside what the ingress asks for.
    """
    request = decode_request(submission.payload)
    params = request.sampling_params
    if params is None:
        raise ValueError("only generation requests are served")
    request.request_id = submission.request_id
    request.arrival_time = time.time() - submission.age_s
    lengths = entry.output_tokens, submission.emitted_tokens, entry.output_bound_tokens
    arrival_s = entry.arrival_s - submission.early_s - delivery_s
    objective = to_extra_args(submission.slo, arrival_s, *lengths, owner_of(submission))
    asked = {name: value for name, value in (params.extra_args or {}).items() if name not in ENGINES_ONLY}
    params.extra_args = asked | objective
    if submission.prefill_only:
        params.max_tokens, params.min_tokens = 1, min(params.min_tokens, 1)
        params.extra_args[PARAMS] = prefill_params(submission.request_id)
    elif submission.transfer:
        params.extra_args[PARAMS] = from_transfer(submission.transfer)
    return request
