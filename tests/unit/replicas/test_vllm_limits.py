"""What a vLLM engine tells about the planner in its other process."""

import asyncio

import pytest

from planning.limits import LIVE_FILLER
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
    assert engine.state().limits == PlanLimits(32, 512, 0.2, LIVE_FILLER, 0.4)
    engine._client = Core()

    async def reconfigure() -> None:
        await engine.configure("slo", {"token_budget": 256, "max_iteration_s": 0.05})
        with pytest.raises(ValueError, match="unknown"):
            await engine.configure("unknown", {"best_effort_share": 0.9})

    asyncio.run(reconfigure())
    assert engine.state().limits == PlanLimits(32, 256, 0.05, LIVE_FILLER, 0.0)
