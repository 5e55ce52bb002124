"""vLLM's own configuration for a replica, and the executor that its engine runs on. Imports vllm."""

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import msgspec
from vllm import AsyncEngineArgs
from vllm.config import KVTransferConfig, VllmConfig
from vllm.v1.executor import Executor

from profiles.store import load_profile
from profiles.suggest import suggest_near
from replicas.config import EMBEDDED_MODEL, ReplicaConfig
from replicas.embedded import ensure_embedded_model
from replicas.kv_transfer import connector_config
from replicas.request_rows import KEY
from replicas.timed_device import TimedSettings
from replicas.timed_executor import TIMED, TetheredTimedExecutor, keep_in_flight
from replicas.vllm_executor import tethered_executor

SCHEDULER = "replicas.vllm_scheduler.SloScheduler"
GIB = 1 << 30


def check_arguments(names: Iterable[str]) -> None:
    """Raise ``ValueError`` for the first of ``engine_kwargs`` that vLLM's ``AsyncEngineArgs`` does not have."""
    known = [field.name for field in fields(AsyncEngineArgs)]
    for name in names:
        if name not in known:
            near = suggest_near(name, known) or "vLLM has no such argument"
            raise ValueError(f"engine_kwargs.{name}: unknown key; {near}")


def engine_config(config: ReplicaConfig, link: str) -> VllmConfig:
    """vLLM's own config for a replica; ``link`` is the path on which the scheduler reports."""
    check_arguments(config.engine_kwargs)
    embedded = config.model == EMBEDDED_MODEL
    arguments: dict[str, Any] = dict(
        model=str(ensure_embedded_model()) if embedded else config.model,
        dtype="float32" if embedded and config.dtype == "auto" else config.dtype,
        load_format=config.load_format,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        block_size=config.block_size,
        enable_prefix_caching=config.enable_prefix_caching,
        enforce_eager=config.enforce_eager,
        use_tqdm_on_load=False,
        scheduler_cls=SCHEDULER,
        additional_config={KEY: _for_the_scheduler(config, link) | _for_the_device(config)},
    )
    if config.kv_cache_gib:
        arguments["kv_cache_memory_bytes"] = int(config.kv_cache_gib * GIB)
    if config.kv_connector:
        settings = connector_config(config.kv_connector, config.kv_connector_extra_config)
        arguments["kv_transfer_config"] = KVTransferConfig(**settings)
    if config.num_speculative_tokens:
        arguments["speculative_config"] = {
            "method": "ngram",
            "num_speculative_tokens": config.num_speculative_tokens,
            "prompt_lookup_min": config.prompt_lookup_min,
            "prompt_lookup_max": config.prompt_lookup_max,
        }
    made = AsyncEngineArgs(**(arguments | config.engine_kwargs)).create_engine_config()
    if config.is_timed:
        keep_in_flight(made, config.depth)
    return made


def _for_the_scheduler(config: ReplicaConfig, link: str) -> dict[str, Any]:
    return {
        "link": link,
        "profile": config.profile_name,
        "policy": config.policy,
        "options": config.policy_options,
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
        spread=config.iteration_spread,
        acceptance=config.draft_acceptance,
    )
    return {TIMED: msgspec.to_builtins(settings)}


def engine_executor(config: ReplicaConfig, made: VllmConfig) -> type[Executor]:
    """The class by which the engine's process runs batches."""
    return TetheredTimedExecutor if config.is_timed else tethered_executor(made.parallel_config.world_size)
