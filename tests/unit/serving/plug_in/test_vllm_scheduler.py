"""The plug-in's scheduler without an engine: what it schedules, and where it gets its settings from."""

import logging
import time
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from serving.config.base import ConfigError
from serving.plug_in import vllm_scheduler
from serving.plug_in.vllm_scheduler import PlugInScheduler, _settings, find_profile

SIZES = dict(max_num_seqs=8, max_num_batched_tokens=256)
TIERS = {"tiers": [{"name": "soon", "ttft_ms": 60000}], "profile": "embedded-cpu"}


def scheduler(told: dict[str, Any], tmp_path: Any) -> PlugInScheduler:
    import torch
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import init_none_hash
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    from replicas.config import ReplicaConfig
    from replicas.vllm_settings import engine_config

    config = engine_config(ReplicaConfig(**SIZES), str(tmp_path / "unused"))  # type: ignore[arg-type]
    config.additional_config, config.cache_config.num_gpu_blocks = {"polyslo": told}, 512
    init_none_hash(sha256)
    spec = FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=1, dtype=torch.float32)
    return PlugInScheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(512, [], [KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=32,
    )


def add(to: PlugInScheduler, name: str, tokens: int, **xargs: Any) -> None:
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher
    from vllm.v1.request import Request

    params = SamplingParams(max_tokens=20, ignore_eos=True, extra_args=xargs or None)
    arrived_s = time.time() - 1.0 + 0.01 * len(to.requests)
    prompt, hasher = [7 + len(to.requests)] * tokens, get_request_block_hasher(32, sha256)
    to.add_request(Request(name, prompt, params, None, arrival_time=arrived_s, block_hasher=hasher))


def test_an_objective_goes_before_what_came_earlier(tmp_path: Any) -> None:
    ours = scheduler(TIERS, tmp_path)
    for name in ("bulk1", "bulk2"):
        add(ours, name, 200)
    add(ours, "urgent", 100, slo_tier="soon")
    assert ours.schedule().num_scheduled_tokens["urgent"] == 100
    ours.shutdown()


def test_without_objectives_steps_are_vllms_own(tmp_path: Any) -> None:
    ours = scheduler(TIERS, tmp_path)
    for name, tokens in (("bulk1", 200), ("bulk2", 100), ("bulk3", 10)):
        add(ours, name, tokens)
    add(ours, "wrong", 10, slo_teir="soon")  # is told in the log, and served
    assert ours.schedule().num_scheduled_tokens == {"bulk1": 200, "bulk2": 56}
    ours.shutdown()


def test_forged_objectives_of_a_fleet_count_for_nothing(tmp_path: Any) -> None:
    ours = scheduler(TIERS, tmp_path)
    add(ours, "bulk", 200)
    add(ours, "forged", 100, polyslo=[0.0, 0.001, 0.001, 1.0, 1, 0, False, 0, 0, 0, 9.0])
    assert ours.schedule().num_scheduled_tokens["bulk"] == 200
    ours.shutdown()


def test_settings_stay_as_they_were_stated(tmp_path: Any) -> None:
    ours = scheduler(TIERS, tmp_path)
    assert ours.vllm_config.additional_config == {"polyslo": TIERS}
    ours.shutdown()


def test_a_wrong_setting_is_one_line_in_the_log() -> None:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    vllm_scheduler.logger.addHandler(handler)
    try:
        with pytest.raises(ConfigError):
            _settings(SimpleNamespace(additional_config={"polyslo": {"profle": "x"}}))
    finally:
        vllm_scheduler.logger.removeHandler(handler)
    assert lines == ["polyslo: --additional-config: polyslo: profle: unknown key; did you mean 'profile'?"]


def test_a_model_that_nobody_has_measured_gets_a_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    from serving.plug_in.settings import PlugInSettings

    model = SimpleNamespace(model="somebody/model", quantization=None, dtype="torch.bfloat16")
    config: Any = SimpleNamespace(model_config=model, parallel_config=SimpleNamespace(tensor_parallel_size=1))
    monkeypatch.setattr(vllm_scheduler, "gpu_name", lambda: "NVIDIA H200")
    assert find_profile(PlugInSettings(), config) == ("h100_sxm__llama-3.1-8b", True)
    model.model = "meta-llama/Llama-3.1-8B-Instruct"
    assert find_profile(PlugInSettings(), config) == ("h200_sxm__llama-3.1-8b", False)
    with pytest.raises(ConfigError, match="unknown profile 'nowhere'"):
        find_profile(PlugInSettings(profile="nowhere"), config)
