"""vLLM's scheduler with objectives: shapes the inputs of ``schedule()`` and lets vLLM do the rest. Runs in EngineCore.

Nothing of vLLM is changed or copied. What the subclass relies on is named in ``VLLM_ATTRIBUTES`` and tested.
"""

import time
from collections import deque
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine.core import EngineCore
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from controller.wire import Step
from replicas.engine_link import RequestTick, TickSender

REQUESTS_EVERY_S = 0.1
INF = float("inf")


class SloScheduler(AsyncScheduler):
    """Serves by deadline, best effort last; reports every iteration to its replica."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = self.vllm_config.additional_config["polyslo"]
        self._link = TickSender(settings["link"])
        self._policy = settings["policy"]
        self._in_flight: deque[tuple[Step, float]] = deque()
        self._last_done_s = 0.0
        self._iterations = 0
        self._requests_due_s = 0.0

    def polyslo_configure(self, policy: str, options: dict[str, float]) -> None:
        """Change policy and options at run time."""
        self._policy = policy

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        if self._policy != "vllm":
            self._shape()
        started_s = time.monotonic()
        output = super().schedule(throttle_prefills)
        self._in_flight.append((self._composition(output), started_s))
        return output

    def _shape(self) -> None:
        self.running.sort(key=lambda r: (_remaining(r) > 1, _due_s(r)))
        if len(self.waiting) > 1:
            ordered = sorted(self.waiting, key=_due_s)
            self.waiting.clear()
            self.waiting.extend(ordered)
        if self.waiting and _due_s(self.waiting[0]) < INF:
            self._make_room(self.waiting[0])

    def _make_room(self, request: Request) -> None:
        """Preempt best effort, latest first, until ``request`` fits."""
        needed = -(-request.num_tokens // self.block_size) + 1
        pool = self.kv_cache_manager.block_pool
        full = len(self.running) >= self.max_num_active_reqs
        for victim in [r for r in reversed(self.running) if _due_s(r) == INF]:
            if not full and pool.get_num_free_blocks() >= needed:
                return
            self.running.remove(victim)
            self._preempt_request(victim, time.monotonic())
            self.prev_step_scheduled_req_ids.discard(victim.request_id)
            self.waiting.remove(victim)
            self.waiting.append(victim)
            full = False

    def _composition(self, output: SchedulerOutput) -> Step:
        """The batch of one iteration in the terms of the iteration-time model, without its duration."""
        kv_tokens, pairs, depth = 0, 0.0, 0
        for request_id, tokens in output.num_scheduled_tokens.items():
            cached = self.requests[request_id].num_computed_tokens - tokens
            drafts = len(output.scheduled_spec_decode_tokens.get(request_id, ()))
            if tokens == 1 + drafts:
                kv_tokens += cached + tokens
                depth = max(depth, drafts)
            else:
                pairs += tokens * (cached + tokens / 2)
        return Step(
            output.total_num_scheduled_tokens, kv_tokens, pairs, len(output.num_scheduled_tokens), depth, seconds=0.0
        )

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput) -> Any:
        now_s = time.monotonic()
        step, started_s = self._in_flight.popleft()
        seconds = now_s - max(started_s, self._last_done_s)
        self._last_done_s = now_s
        result = super().update_from_output(scheduler_output, model_runner_output)
        self._push(now_s, Step(*_fields(step)[:-1], seconds) if step.batch_tokens else None)
        return result

    def _push(self, now_s: float, step: Step | None) -> None:
        self._iterations += step is not None
        requests = None
        if now_s >= self._requests_due_s or not self.requests:
            self._requests_due_s = now_s + REQUESTS_EVERY_S
            running = set(self.running)
            requests = [
                RequestTick(request_id, request.num_computed_tokens, request in running, False)
                for request_id, request in self.requests.items()
            ]
        pool = self.kv_cache_manager.block_pool
        used_blocks = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        if not self._link.send(self._iterations, used_blocks * self.block_size, step, requests):
            self._requests_due_s = 0.0


def _fields(step: Step) -> tuple[float, ...]:
    return (step.batch_tokens, step.kv_tokens, step.pairs, step.sequences, step.spec_steps, step.seconds)


def _objective(request: Request) -> list[Any] | None:
    params = request.sampling_params
    return (params.extra_args or {}).get("polyslo") if params is not None else None


def _due_s(request: Request) -> float:
    objective = _objective(request)
    if objective is None or objective[0]:
        return INF
    _, arrival_s, ttft_s, tpot_s = objective[:4]
    return arrival_s + ttft_s + request.num_output_tokens * tpot_s


def _remaining(request: Request) -> int:
    return request.num_tokens + request.num_output_placeholders - request.num_computed_tokens


def _configure(self: EngineCore, policy: str, options: dict[str, float]) -> None:
    self.scheduler.polyslo_configure(policy, options)


EngineCore.polyslo_configure = _configure  # the one name by which a run-time change reaches the scheduler
