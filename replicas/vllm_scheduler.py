"""vLLM's scheduler with objectives: shapes the inputs of ``schedule()`` and lets vLLM do the rest. Runs in EngineCore.

Queues are translated to the planning table, planning forms the batch, and the batch is applied as a quota of tokens per
request: 0 leaves a request out of this step. vLLM is neither changed nor copied; ``tests/unit/replicas`` names every
internal attribute that is relied on here.
"""

import time
from typing import Any

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from planning.batch.composition import TOKENS
from protocol.messages import Step
from replicas.adapters import AdapterRoom, RowStanding
from replicas.engine import to_step
from replicas.engine_reports import IterationReport, report_sender
from replicas.failures import Failures
from replicas.kv_room import KvRoom, block_tokens_of, told_capacity
from replicas.kv_transfer import clipped_to_prompt, saved_tokens
from replicas.positions import accepted_drafts, composition_of, position_of
from replicas.request_rows import KEY, RequestRows
from replicas.step_clock import StepClock
from replicas.step_planner import VLLM_DEFAULT, StepPlanner, profile_coefficients
from replicas.vllm_core import groups_of, late_forming, own_options  # which adds to vLLM's EngineCore

REQUESTS_EVERY_S = 0.1  # how often a tick tells where every request is
READY = (RequestStatus.WAITING, RequestStatus.PREEMPTED)  # to be scheduled, of those that wait


class SloScheduler(AsyncScheduler):
    """Runs what the planner says, reports every iteration to its replica."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = self.vllm_config.additional_config[KEY]
        coefficients, _ = profile_coefficients(settings["profile"])
        groups, blocks = groups_of(self), self.kv_cache_manager.block_pool.num_gpu_blocks
        told_tokens = told_capacity(blocks, self.scheduler_config.watermark, groups, self.max_model_len)
        self._kv = KvRoom(self.kv_cache_manager, groups, told_tokens)
        self._planner = StepPlanner(
            coefficients,
            kv_capacity_tokens=self._kv.capacity_tokens,
            block_tokens=block_tokens_of(groups),
            max_running=self.max_num_active_reqs,
            max_batch_tokens=self.max_num_scheduled_tokens,
        )
        self._own_options = own_options(self.vllm_config)
        self._planner.configure(settings["policy"], self._own_options(settings["options"]))
        self._planner.expect(settings["profile"])
        self._planner.warm_up()
        if self.connector is not None:
            self.connector.get_num_new_matched_tokens = clipped_to_prompt(self.connector.get_num_new_matched_tokens)
        self._rows = RequestRows()
        self._rows.warm_up()
        self._clock = StepClock(self.parallel_config.pipeline_parallel_size)
        self.polyslo_forming = late_forming(self.vllm_config, self._clock, self._planner)
        self._link = report_sender(settings["link"])
        self._iterations, self._planning_s, self._requests_due_s, self._late_due_s = 0, 0.0, 0.0, 0.0
        self._stale: set[Request] = set()  # preempted in flight: vLLM runs them again when that has been delivered
        self._preempted: set[Request] = set()  # since the last tick
        self._late, self._has_quotas, self._is_stuck = set[str](), False, False
        self._adapters = AdapterRoom(self.lora_config.max_loras if self.lora_config else 0)
        self._failures = Failures()
        self._is_splittable = self.scheduler_config.enable_chunked_prefill and not self.need_mamba_block_aligned_split
        self._is_followable = self.num_spec_tokens == 0 and self.num_sampled_tokens_per_step == 1

    def polyslo_configure(self, policy: str, options: dict[str, float]) -> None:
        """Change policy and its options while running; raises ``ValueError`` where vLLM's queues allow no other."""
        if policy != VLLM_DEFAULT and self.policy != SchedulingPolicy.FCFS:
            raise ValueError("policy: vLLM was started with scheduling_policy priority, which knows no other")
        self._planner.configure(policy, self._own_options(options))

    # What vLLM asks us about its requests.

    def add_request(self, request: Request) -> None:
        known = self.requests.get(request.request_id)
        super().add_request(request)
        if known is None:
            with self._failures.caught("taking a request"):
                self._rows.add(request, time.monotonic())
                self._note_cached(request)

    def _free_blocks(self, request: Request) -> None:
        super()._free_blocks(request)
        self._stale.discard(request)
        self._preempted.discard(request)
        with self._failures.caught("forgetting a request"):
            self._rows.remove(request)

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, *args, **kwargs)
        self._rows.drafts.forget(request.request_id)
        self._preempted.add(request)
        if request.num_stale_output_tokens:
            self._stale.add(request)
        with self._failures.caught("following a preemption"):
            self._note_cached(request)

    def _note_cached(self, request: Request) -> None:
        local_tokens = self.kv_cache_manager.get_computed_blocks(request)[1]
        matched = self.connector.get_num_new_matched_tokens if self.connector is not None else None
        self._rows.record_cached(request, saved_tokens(request, local_tokens, self.prefix_replay_tokens, matched))

    def _reserve_prefill_lookahead(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        """vLLM asks this for every request it is about to schedule: the place to cap its tokens."""
        if self._has_quotas and (quota := self._rows.quota(request)) < num_new_tokens:
            if quota <= 0:
                return 0
            is_chunk = quota < request.num_tokens - num_computed_tokens
            if is_chunk and self._is_splittable and not request.has_encoder_inputs:
                num_new_tokens = quota
        self._adapters.take(request)
        return super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        """vLLM asks this first of each that waits, and passes over those that have to wait on."""
        return super()._handle_blocked_waiting_request(request) and self._adapters.fits(request)

    # One step: plan, apply, let vLLM schedule, measure.

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        now_s, predicted_s, composition = time.monotonic(), 0.0, None
        is_closed = throttle_prefills or self.pause_state  # planned prefills would not run, nor who yields to them
        if self._planner.policy.name != VLLM_DEFAULT and not is_closed and (self.running or self.waiting):
            predicted_s, composition = self._try_plan(self._clock.next_start_s(now_s))
            self._planning_s += time.monotonic() - now_s
        self._adapters.begin(self.running)
        output = super().schedule(throttle_prefills)
        self._has_quotas = False
        self._begin_step(now_s, output, predicted_s, composition)
        return output

    def _try_plan(self, start_s: float) -> tuple[float, np.ndarray | None]:
        """``_plan``; where that fails or was of no use to vLLM the last time, vLLM's own order for this step."""
        if self._is_stuck:
            return 0.0, None
        running, waiting = self.running, list(self.waiting)
        try:
            return self._plan(start_s)
        except Exception:
            self._failures.note("planning a step")
            self._put_back(running, waiting)
            return 0.0, None

    def _put_back(self, running: list[Request], waiting: list[Request]) -> None:
        """Every request into the queue of its status, as before a plan that may have been applied in part."""
        self._has_quotas = False
        self._rows.reset()
        preempted = [request for request in running if request.status == RequestStatus.PREEMPTED]
        self.running = [request for request in running if request.status == RequestStatus.RUNNING]
        self.waiting.clear()
        self.waiting.extend([*preempted, *waiting])
        self.prev_step_scheduled_req_ids.difference_update(request.request_id for request in preempted)

    def _begin_step(
        self, now_s: float, output: SchedulerOutput, predicted_s: float, composition: np.ndarray | None
    ) -> None:
        """Follow the step just formed; its plan, if there was one, counts as far as vLLM kept to it."""
        if self.num_spec_tokens > 0:
            self._rows.drafts.begin(output.scheduled_spec_decode_tokens)
        formed = (output.total_num_scheduled_tokens, len(output.num_scheduled_tokens))
        is_unused = composition is not None and composition[TOKENS] > 0 and formed[0] == 0
        # Nothing is in flight whose end would free blocks or let a request go on: the same plan would follow.
        self._is_stuck = is_unused and not self._clock.is_computing
        try:
            self._follow(output, is_planned=composition is not None)
            if composition is None or (composition[0], composition[3]) != formed:
                composition = composition_of(output, self.requests)
                predicted_s = self._planner.predict(composition)
        except Exception:
            self._failures.note("following a step")
            self._rows.reset()
            predicted_s, composition = 0.0, np.zeros(5)
        self._clock.begin(now_s, composition, predicted_s)

    def _plan(self, start_s: float) -> tuple[float, np.ndarray]:
        """Plan the step that starts at ``start_s`` and hand out its quotas."""
        running, waiting = self.running, self._ready_waiting(start_s)
        table = self._rows.gather(running, waiting, self.num_spec_tokens > 0)
        self._rows.begin_lines(table, start_s)
        may_begin = len(running) < self.max_num_running_reqs
        self._planner.limits["kv_capacity_tokens"] = self._kv.capacity_for(table, waiting, may_begin)
        if self.num_spec_tokens > 0:
            self._planner.plan_drafts(table, start_s, self.num_spec_tokens)
        tokens, predicted_s, composition = self._planner.plan(table, start_s)
        if start_s >= self._late_due_s:
            self._late_due_s = start_s + REQUESTS_EVERY_S
            self._late = self._rows.names(self._planner.late(table, start_s))
        # Where the planner sees nothing to run, vLLM may (its prefix cache shares blocks): never stand still.
        self._has_quotas = predicted_s > 0
        if self._has_quotas:
            self._adapters.make_way(running, waiting, tokens)
            self._apply(running, tokens, int(composition[TOKENS]), table["best_effort"])
        return predicted_s, composition

    def _follow(self, output: SchedulerOutput, is_planned: bool) -> None:
        """Keep the table up with what was scheduled, as far as that tells where every request is."""
        if is_planned and self._is_followable:
            begun_s = time.monotonic()
            self._rows.record_step(output.num_scheduled_tokens, self.requests)
            self._planning_s += time.monotonic() - begun_s
        else:
            self._rows.forget()

    def _ready_waiting(self, start_s: float) -> list[Request]:
        """Waiting requests that may be scheduled. One that waits for its grammar or the like gets no tokens yet."""
        waiting = ready = list(self.waiting)
        self._stale = {request for request in self._stale if request.num_stale_output_tokens}
        if self.deferred_waiting or self._stale:
            ready = [request for request in waiting if self._is_ready(request)]
        loaded = [each for each in self.kv_holding_waiting if each.status in READY]
        ready = self._adapters.fitting(self.running, ready, loaded, RowStanding(self._rows, self._planner, start_s))
        self._rows.hold_others(waiting, ready)
        return ready

    def _is_ready(self, request: Request) -> bool:
        return super()._handle_blocked_waiting_request(request) and (
            request not in self._stale or request.drop_stale_output
        )

    def _apply(self, running: list[Request], tokens: np.ndarray, sum_tokens: int, yields: np.ndarray) -> None:
        """Quotas to every request, KV cache from those that must give it up, chosen newcomers to the front."""
        for request in self.kv_holding_waiting:
            self._rows.leave(request)
        preempted = self._rows.set_quotas(tokens)
        count, waiting = len(running), list(self.waiting)
        if self.num_spec_tokens > 0:
            for request, quota in zip(running, tokens[:count].tolist(), strict=True):
                if quota > 0 or self.scheduler_config.async_scheduling:  # who is left out keeps them
                    request.spec_token_ids = request.spec_token_ids[: max(quota - 1, 0)]
        victims = [running[i] for i in preempted if self._request_blocks_can_be_freed(running[i])]
        if victims or self._kv.is_short(len(tokens), sum_tokens):
            # vLLM takes blocks from the back of the list: planned first, best effort last.
            rank = 2 * (tokens[:count] <= 0) + yields[:count]
            leaving = set(victims)
            order = [i for each in range(4) for i in np.flatnonzero(rank == each).tolist()]
            self.running = [running[i] for i in order if running[i] not in leaving]
            self._preempt(victims)
        if waiting:
            chosen = self._rows.chosen(waiting)
            if victims or chosen != waiting[: len(chosen)]:
                others = [request for request in waiting if self._rows.quota(request) <= 0]
                self.waiting.clear()
                self.waiting.extend([*chosen, *others, *victims])

    def _preempt(self, victims: list[Request]) -> None:
        """Take the KV cache of running requests; their tokens are kept and computed again when they resume."""
        now_s = time.monotonic()
        for request in victims:
            self._preempt_request(request, now_s, drop_stale_output=self.requires_kv_delivery)
            # It may resume in the very next step: the model runner must then be sent its tokens again.
            self.prev_step_scheduled_req_ids.discard(request.request_id)

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput) -> Any:
        self._clock.returned_s = returned_s = time.monotonic()
        with self._failures.caught("measuring drafts"):
            if self.num_spec_tokens > 0:  # vLLM cuts the sampled tokens of those that stop
                self._planner.record_acceptance(accepted_drafts(scheduler_output, model_runner_output))
        result = super().update_from_output(scheduler_output, model_runner_output)
        if self.num_spec_tokens > 0:
            self._rows.drafts.end()
        if (received := model_runner_output.kv_connector_output) and received.invalid_block_ids:
            self._rows.forget()  # vLLM has taken tokens back whose KV did not arrive
        with self._failures.caught("measuring a step"):
            self._end_step(returned_s)
        return result

    def _end_step(self, now_s: float) -> None:
        """Measure the oldest step in flight, learn from it and tell the replica."""
        composition, seconds = self._clock.finish(now_s, is_continuing=bool(self.running or self.waiting))
        step = None
        if composition[0] > 0:
            self._iterations += 1
            self._planner.observe(composition, seconds)
            step = to_step(composition, seconds)
        self._push(now_s, step)

    def _push(self, now_s: float, step: Step | None) -> None:
        """Tell the replica about the step, at once who was preempted, and now and then where every request is."""
        told, is_due = [*self._preempted], now_s >= self._requests_due_s or not self.requests
        if is_due:
            self._requests_due_s, told = now_s + REQUESTS_EVERY_S, [*self.requests.values()]
        running, late = RequestStatus.RUNNING, self._late
        requests = [position_of(each, each.status == running, each.request_id in late) for each in told]
        self._preempted.clear()
        used_tokens, news = self._kv.told_used_tokens, requests if is_due or requests else None
        learnt = self.num_spec_tokens, self._planner.promised_acceptance, *self._planner.lead
        tick = IterationReport(self._iterations, self._planning_s, used_tokens, self._failures.count, *learnt)
        if not self._link.send(tick, step, news):
            self._requests_due_s = now_s

    def shutdown(self) -> None:
        super().shutdown()
        self._link.close()
