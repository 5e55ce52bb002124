"""The scheduler for ``vllm serve --scheduler-cls``: objectives of single requests, without Ray and a controller.

Runs in vLLM's engine process. What an objective is worth to the engine is decided where it is for a fleet's replicas
(``replicas.vllm_scheduler``); here the objective is found in the request itself. Nothing is refused: there is no
admission. As long as no request has an objective, every step is vLLM's own.
"""

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.request import Request, RequestStatus

from profiles.profile import ProfileError
from profiles.store import load_profile
from protocol.messages import Slo
from replicas.auto_profile import gpu_name, known_profile
from replicas.config import AUTO, EMBEDDED_MODEL, EMBEDDED_PROFILE, ReplicaConfig
from replicas.embedded import embedded_folder
from replicas.request_rows import KEY, to_extra_args
from replicas.vllm_scheduler import SloScheduler
from serving.config.base import ConfigError
from serving.plug_in.line import Line
from serving.plug_in.objectives import objective_of
from serving.plug_in.settings import PlugInSettings, check_beside, read_settings
from serving.request.slo import SloError

GUESSES = {False: EMBEDDED_PROFILE, True: "h100_sxm__llama-3.1-8b"}  # whether there is a GPU -> a profile of its form
LENGTH_WEIGHT = 0.05  # of one more finished output in the running mean
WARN_EVERY_S = 10.0

logger = init_logger("vllm.polyslo")  # below vLLM's own, whose handler it uses


class PlugInScheduler(SloScheduler):
    """``SloScheduler`` that reads objectives from ``vllm_xargs`` and settings from ``--additional-config``."""

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        self.settings = settings = _settings(vllm_config)
        self._tiers = settings.to_index()
        profile, is_guess = find_profile(settings, vllm_config)
        told = {"link": "", "profile": profile, "policy": settings.scheduler, "options": settings.scheduler_options}
        stated = vllm_config.additional_config
        vllm_config.additional_config = {**(stated or {}), KEY: told}
        try:
            super().__init__(vllm_config, *args, **kwargs)
        finally:
            vllm_config.additional_config = stated  # others read it, such as a scheduler made after this one
        if is_guess:
            self._planner.learn_speed()
        self._bound: set[str] = set()  # requests that have an objective
        self._line = Line(self.max_num_scheduled_tokens)
        self._mean_tokens = 0.0  # of outputs that ended
        self._is_shaped, self._warn_due_s = False, 0.0
        source = "learnt from the first iterations" if is_guess else profile
        tiers = ", ".join(tier.name for tier in self._tiers.table.tiers) if settings.tiers else "none"
        logger.info("polyslo: scheduler %s, profile %s, tiers %s", settings.scheduler, source, tiers)

    # What a request asks for.

    def add_request(self, request: Request) -> None:
        if request.request_id not in self.requests:
            self._give_objective(request)
        super().add_request(request)

    def _give_objective(self, request: Request) -> None:
        """Put the objective where ``RequestRows`` reads it; a request without one keeps its place in the line."""
        params = request.sampling_params
        if params is None:
            return
        slo, hint = self._objective(request)
        if not slo.best_effort:
            self._bound.add(request.request_id)
        arrival_s = time.monotonic() - max(0.0, time.time() - request.arrival_time)
        tokens = min(hint or int(self._mean_tokens) or request.max_tokens, request.max_tokens)
        params.extra_args = (params.extra_args or {}) | to_extra_args(slo, arrival_s, tokens, 0)

    def _objective(self, request: Request) -> tuple[Slo, int]:
        xargs = request.sampling_params.extra_args or {}
        try:
            found = objective_of(xargs, self._tiers)
        except SloError as error:
            if (now_s := time.monotonic()) >= self._warn_due_s:
                self._warn_due_s = now_s + WARN_EVERY_S
                logger.warning("polyslo: %s is served without an objective: %s", request.request_id, error)
            found = None
        return found or (Slo(best_effort=True), 0)

    def _free_blocks(self, request: Request) -> None:
        self._bound.discard(request.request_id)
        if request.status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED):
            made = request.num_output_tokens
            self._mean_tokens += LENGTH_WEIGHT * (made - self._mean_tokens) if self._mean_tokens else made
        super()._free_blocks(request)

    # The order.

    def _try_plan(self, start_s: float) -> tuple[float, np.ndarray | None]:
        """A plan where some request has an objective, and the engine's speed is known; else vLLM's own step."""
        if self._bound and self._planner.is_ready:
            self._is_shaped = True
            return super()._try_plan(start_s)
        if self._is_shaped:
            self._restore_order()
        return 0.0, None

    def _restore_order(self) -> None:
        """The queue as vLLM would have it: what was preempted, then by arrival."""
        self._is_shaped = False
        waiting = sorted(self.waiting, key=lambda r: (r.status != RequestStatus.PREEMPTED, r.arrival_time))
        self.waiting.clear()
        self.waiting.extend(waiting)

    def _ready_waiting(self, start_s: float) -> list[Request]:
        """Without those that have no objective and whose turn has not come: among them the order is vLLM's."""
        ready = super()._ready_waiting(start_s)
        behind = self._line.behind(
            [request for request in self.running if request.request_id not in self._bound],
            [request for request in ready if request.request_id not in self._bound],
            time.monotonic(),
        )
        for request in behind:
            self._rows.hold(request)
        return [request for request in ready if request not in behind] if behind else ready


def _settings(vllm_config: VllmConfig) -> PlugInSettings:
    try:
        settings = read_settings(vllm_config.additional_config, os.environ)
        check_beside(vllm_config.scheduler_config, vllm_config.parallel_config)
        return settings
    except ConfigError as error:
        for line in str(error).splitlines():
            logger.error("polyslo: %s", line)
        raise


def find_profile(settings: PlugInSettings, vllm_config: VllmConfig) -> tuple[str, bool]:
    """The profile to plan by, and whether it is a guess that the first iterations scale; raises ``ConfigError``."""
    if settings.profile != AUTO:
        try:
            load_profile(settings.profile)
        except ProfileError as error:
            logger.error("polyslo: profile: %s", error)
            raise ConfigError(f"profile: {error}") from None
        return settings.profile, False
    gpu, model, parts = gpu_name(), vllm_config.model_config, vllm_config.parallel_config.tensor_parallel_size
    is_embedded = Path(model.model) == embedded_folder()
    stated = {"tensor_parallel_size": parts} if parts > 1 else {}
    if model.quantization:
        stated["quantization"] = model.quantization
    dtype = str(model.dtype).removeprefix("torch.")
    name = EMBEDDED_MODEL if is_embedded else model.model
    known = known_profile(ReplicaConfig(model=name, dtype=dtype, engine_kwargs=stated, profile=AUTO), gpu)
    return (known, False) if known else (GUESSES[bool(gpu)], True)
