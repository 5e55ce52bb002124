"""What a vLLM engine tells about the planner in its other process."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from protocol.messages import LIVE_STRETCH
from replicas.config import ReplicaConfig
from replicas.engine import PlanLimits


class Core:
    """Stands for the engine core: takes what it is called with, unless it does not know the policy."""

    async def call_utility_async(self, method: str, policy: str, options: dict[str, float]) -> None:
        assert method == "polyslo_configure"
        if policy == "unknown":
            raise ValueError(policy)


def test_what_plans_keep_to_is_told_as_the_engine_took_it() -> None:
    from replicas.vllm_engine import VllmEngine

    config = ReplicaConfig(cores=(0,), max_num_batched_tokens=512, policy_options={"best_effort_share": 0.4})
    engine = VllmEngine(config)
    assert engine.state().limits == PlanLimits(32, 512, 0.2, LIVE_STRETCH, 0.4)
    engine._client = Core()

    async def reconfigure() -> None:
        await engine.configure("slo", {"token_budget": 256, "max_iteration_s": 0.05})
        with pytest.raises(ValueError, match="unknown"):
            await engine.configure("unknown", {"best_effort_share": 0.9})

    asyncio.run(reconfigure())
    assert engine.state().limits == PlanLimits(32, 256, 0.05, LIVE_STRETCH, 0.0)


@pytest.mark.parametrize(("windows", "tokens"), [(0, 39 * 32), (2, 13 * 32)])
def test_the_controller_is_told_as_much_kv_cache_as_the_engine_plans_with(
    make_bench: Callable[..., Any], windows: int, tokens: int
) -> None:
    """vLLM keeps the first block for itself, and takes blocks of every group of layers for the same token."""
    from vllm.v1.engine.core import EngineCore

    from replicas.vllm_engine import VllmEngine

    bench = make_bench(blocks=40, windows=windows)
    engine = VllmEngine(ReplicaConfig(cores=(0,)))
    batches = SimpleNamespace(max_num_seqs=7, max_num_batched_tokens=99, async_scheduling=True, watermark=0.0)
    made = SimpleNamespace(
        cache_config=bench.scheduler.cache_config,
        scheduler_config=batches,
        model_config=SimpleNamespace(max_model_len=500),
        parallel_config=SimpleNamespace(pipeline_parallel_size=1, data_parallel_size=1),
        max_concurrent_batches=3,
        additional_config=None,
    )
    engine._note_sizes(made, EngineCore.get_kv_cache_group_metadata(SimpleNamespace(scheduler=bench.scheduler)))
    assert engine.state().kv_capacity_tokens == tokens
    assert bench.scheduler._planner.limits["kv_capacity_tokens"] == 39 * 32, "less what other groups take, each time"
    assert (engine.state().max_running, engine.state().limits.max_batch_tokens) == (7, 99)
    assert engine.state().limits.newcomer_share == 1 / 3


def test_a_rejected_request_is_no_iteration() -> None:
    """An engine that hangs is not made young again by requests that it never saw."""
    from vllm.v1.engine import EngineCoreOutputs

    from replicas.vllm_engine import VllmEngine

    async def outputs() -> EngineCoreOutputs:
        return EngineCoreOutputs()

    engine = VllmEngine(ReplicaConfig(cores=(0,)))
    engine._client, engine._alive_s = SimpleNamespace(get_output_async=outputs), 7.0
    assert asyncio.run(engine.next_outputs()) == []
    assert engine._alive_s == 7.0
