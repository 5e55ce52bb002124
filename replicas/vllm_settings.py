"""vLLM's own configuration for a replica, and the executor that its engine runs on. Imports vllm."""

from typing import Any

import msgspec
from vllm import AsyncEngineArgs
from vllm.config import KVTransferConfig, VllmConfig
from vllm.usage.usage_lib import UsageContext
from vllm.v1.executor import Executor

from profiles.store import load_profile
from replicas.config import EMBEDDED_MODEL, ReplicaConfig
from replicas.embedded import ensure_embedded_model
from replicas.kv_transfer import connector_config
from replicas.request_rows import KEY
from replicas.timed_batches import TIMED
from replicas.timed_device import TimedSettings
from replicas.timed_executor import TetheredTimedExecutor, keep_in_flight
from replicas.vllm_arguments import engine_arguments
from replicas.vllm_executor import tethered_executor
from replicas.vllm_kv_events import events_config

TIMED_WORKER = "replicas.timed_worker.TimedWorker"
SCHEDULER = "replicas.vllm_scheduler.SloScheduler"
GIB = 1 << 30


def model_arguments(config: ReplicaConfig) -> dict[str, Any]:
    """Arguments of vLLM that say which model it is, and how long a sequence may be."""
    embedded = config.model == EMBEDDED_MODEL
    return dict(
        model=str(ensure_embedded_model()) if embedded else config.model,
        dtype="float32" if embedded and config.dtype == "auto" else config.dtype,
        load_format=config.load_format,
        max_model_len=config.max_model_len or None,
    )


def engine_config(config: ReplicaConfig, link: str) -> VllmConfig:
    """vLLM's own config for a replica; ``link`` is the path on which the scheduler reports.

    Raises:
        ValueError: naming the one of ``engine_kwargs`` that vLLM does not know or take.
    """
    given = engine_arguments(config.engine_kwargs)
    arguments: dict[str, Any] = model_arguments(config) | dict(
        max_num_seqs=config.max_num_seqs or None,
        max_num_batched_tokens=config.max_num_batched_tokens or None,
        block_size=config.block_size,
        enable_prefix_caching=config.enable_prefix_caching,
        enforce_eager=config.enforce_eager,
        use_tqdm_on_load=False,
        scheduler_cls=SCHEDULER,
        additional_config={KEY: _for_the_scheduler(config, link) | _for_the_device(config)},
    )
    if config.is_placed:
        arguments |= {"worker_cls": TIMED_WORKER} if config.is_timed else {"distributed_executor_backend": "ray"}
    if config.kv_cache_gib:
        arguments["kv_cache_memory_bytes"] = int(config.kv_cache_gib * GIB)
    if config.kv_connector:
        own = config.kv_connector, config.kv_connector_extra_config, config.kv_role
        settings = connector_config(*own, **config.kv_transfer_config)
        arguments["kv_transfer_config"] = KVTransferConfig(**settings)
    if config.tells_prefixes and link:
        arguments["kv_events_config"] = events_config(link)
    if config.num_speculative_tokens:
        arguments["speculative_config"] = {
            "method": "ngram",
            "num_speculative_tokens": config.num_speculative_tokens,
            "prompt_lookup_min": config.prompt_lookup_min,
            "prompt_lookup_max": config.prompt_lookup_max,
        }
    made = AsyncEngineArgs(**(arguments | given)).create_engine_config(UsageContext.OPENAI_API_SERVER)
    if config.is_timed:
        keep_in_flight(made, config.depth)
    if config.stages > 1 and not made.scheduler_config.async_scheduling:
        raise ValueError("engine_kwargs.pipeline_parallel_size: vLLM schedules this engine synchronously; remove it")
    return made


def _for_the_scheduler(config: ReplicaConfig, link: str) -> dict[str, Any]:
    return {
        "link": link,
        "profile": config.profile_name,
        "policy": config.policy,
        "options": config.policy_options,
        "forms_late": True,  # its executor tells when a step was launched
    }


def _for_the_device(config: ReplicaConfig) -> dict[str, Any]:
    """What a timed device goes by; a real one needs nothing of us."""
    if not config.is_timed:
        return {}
    profile = load_profile(config.profile_name)
    settings = TimedSettings(
        coefficients=(profile.coefficients / config.speed).tolist(),
        kv_capacity_tokens=config.kv_capacity_tokens or profile.kv_capacity_tokens,
        steps_in_flight=config.depth,
        spread=config.iteration_spread or 0.0,
        strays=config.strays(profile),
        acceptance=config.draft_acceptance,
        stages=config.stages,
    )
    return {TIMED: msgspec.to_builtins(settings)}


def engine_executor(config: ReplicaConfig, made: VllmConfig) -> type[Executor]:
    """The class by which the engine's process runs batches."""
    if config.is_placed:
        from replicas.vllm_ray_executor import TetheredRayExecutor, TimedRayExecutor

        return TimedRayExecutor if config.is_timed else TetheredRayExecutor
    return TetheredTimedExecutor if config.is_timed else tethered_executor(made.parallel_config.world_size)
