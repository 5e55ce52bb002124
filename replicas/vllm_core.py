"""What a replica calls by name in its engine's process. Imports vllm, and adds to its ``EngineCore``."""

import math
import queue
import time
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.engine.core import EngineCore, EngineCoreProc

from replicas.kv_room import KvGroup, to_groups
from replicas.late_forming import REMOTE_LAUNCH_S, LateForming
from replicas.request_rows import KEY
from replicas.step_clock import StepClock
from replicas.step_planner import StepPlanner, options_of


def groups_of(scheduler: Any) -> tuple[KvGroup, ...]:
    """The KV-cache groups of a scheduler, as the engine core would tell them."""
    core: Any = SimpleNamespace(scheduler=scheduler)
    return to_groups(EngineCore.get_kv_cache_group_metadata(core), scheduler.max_num_scheduled_tokens)


def _configure(self: EngineCore, policy: str, options: dict[str, float]) -> None:
    self.scheduler.polyslo_configure(policy, options)


EngineCore.polyslo_configure = _configure  # the one name by which a run-time change reaches the scheduler


def forms_late(config: VllmConfig) -> bool:
    """Whether the engine's next step may wait while one is in flight: nothing else waits for it."""
    own, told = config.parallel_config, (config.additional_config or {}).get(KEY, {})
    return (
        told.get("forms_late", False)
        and config.scheduler_config.async_scheduling
        and config.max_concurrent_batches == 2  # with room for a third, outputs of the first would wait too
        and own.pipeline_parallel_size == 1  # its stages would stand idle
        and own.data_parallel_size == 1  # its ranks step together
    )


def own_options(config: VllmConfig) -> Callable[[Mapping[str, float]], dict[str, float]]:
    """What makes the options of a policy those inside this engine, as it was started."""
    is_asynchronous, is_late = config.scheduler_config.async_scheduling, forms_late(config)

    def own(options: Mapping[str, float]) -> dict[str, float]:
        known = {name: value for name, value in options.items() if is_late or name != "lead_s"}
        return options_of(known, is_asynchronous, is_late)

    return own


def late_forming(config: VllmConfig, clock: StepClock, planner: StepPlanner) -> LateForming | None:
    """What says when the engine's next step is to be formed; None: at once."""
    unseen_s = 0.0 if config.parallel_config.world_size == 1 else REMOTE_LAUNCH_S
    return LateForming(clock, planner, unseen_s) if forms_late(config) else None


def _process_input_queue(self: EngineCoreProc) -> None:
    """vLLM's, and then go on taking what comes until the next step is to be formed."""
    _take_what_has_come(self)
    if (forming := getattr(self.scheduler, "polyslo_forming", None)) is None:
        return
    at_s = -math.inf
    with self.scheduler._failures.caught("timing a step"):
        at_s = forming.form_at_s(time.monotonic(), getattr(self.model_executor, "launched_s", -math.inf))
    while self.is_running() and (left_s := at_s - time.monotonic()) > 0.0:
        try:
            request = self.input_queue.get(timeout=left_s)
        except queue.Empty:
            return
        self._handle_client_request(*request)


_take_what_has_come = EngineCoreProc._process_input_queue
EngineCoreProc._process_input_queue = _process_input_queue
