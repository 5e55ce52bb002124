"""The simulated engine in real time, at many times the speed of its profile."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from planning.batch.registry import batch_policy_names
from profiles.kernels import iteration_s
from profiles.store import load_profile, save_profile
from protocol.messages import (
    LIVE_STRETCH,
    LOAD_TOKENS,
    PREFILLED,
    Delta,
    EngineCounts,
    Slo,
    Submission,
    request_uid,
)
from replicas.config import ReplicaConfig
from replicas.engine import EngineFailure, PlanLimits, Pulse
from replicas.simulated import SimulatedEngine, simulated_tokens
from tests.support.planted_profile import SPREAD

LOOSE = Slo(ttft_s=60.0, tpot_s=1.0)


def submission(name: str, prompt: int = 100, max_tokens: int = 20, slo: Slo = LOOSE, emitted: int = 0) -> Submission:
    return Submission(name, prompt, emitted, max_tokens, slo, 0.0, max_tokens, request_uid(name))


def play(scenario: Callable[[SimulatedEngine], Awaitable[None]], **settings: Any) -> None:
    """Run ``scenario`` with a started engine, 200 times as fast as an H200."""

    async def run() -> None:
        defaults: dict[str, Any] = dict(engine="simulated", profile="h200_sxm__llama-3.1-8b", speed=200.0)
        engine = SimulatedEngine(ReplicaConfig(**(defaults | settings)))
        await engine.start()
        async with asyncio.timeout(60):
            await scenario(engine)
        await engine.stop()

    asyncio.run(run())


async def first_deltas(engine: SimulatedEngine) -> list[Delta]:
    while not (deltas := await engine.next_outputs()):
        pass
    return deltas


async def collect(engine: SimulatedEngine, names: set[str]) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {name: [] for name in names}
    left = set(names)
    while left:
        for delta in await engine.next_outputs():
            tokens[delta.request_id] += delta.token_ids
            if delta.finish:
                assert delta.finish == "length"
                left.discard(delta.request_id)
    return tokens


def test_a_prefill_ends_with_its_first_token_and_its_kv_cache_spares_the_next_engine_the_work() -> None:
    async def scenario(engine: SimulatedEngine) -> None:
        asked = msgspec.structs.replace(submission("x", prompt=3000, max_tokens=5), prefill_only=True)
        await engine.submit([asked])
        (delta,) = await first_deltas(engine)
        assert (delta.token_ids, delta.finish) == (simulated_tokens(request_uid("x"), 0, 1), PREFILLED)
        assert engine.state().requests == ()
        assert sum(step.batch_tokens for step in engine.take_steps()) == 3000
        moved = msgspec.structs.replace(asked, prefill_only=False, emitted_tokens=1, transfer=delta.transfer)
        await engine.submit([moved])
        assert tuple((await collect(engine, {"x"}))["x"]) == simulated_tokens(request_uid("x"), 1, 4)
        assert [step.batch_tokens for step in engine.take_steps()] == [1, 1, 1, 1]

    play(scenario)


def test_the_pulse_is_the_state_in_brief() -> None:
    async def scenario(engine: SimulatedEngine) -> None:
        assert engine.pulse() == Pulse(0, False, 0.0)
        await engine.submit([submission("x", prompt=1024, max_tokens=5), submission("y", max_tokens=3)])
        assert engine.pulse() == Pulse(0, True, (1 + 1024 / LOAD_TOKENS) + (1 + 100 / LOAD_TOKENS))
        await first_deltas(engine)
        state = engine.state()
        assert engine.pulse() == Pulse(state.steps, state.busy, float(len(state.requests)))
        await engine.abort(["x"])
        assert engine.pulse().load == 1.0
        assert len((await collect(engine, {"y"}))["y"]) <= 3
        assert engine.pulse() == Pulse(engine.state().steps, False, 0.0)

    play(scenario)


def test_a_request_of_one_token_is_no_prefill() -> None:
    async def scenario(engine: SimulatedEngine) -> None:
        await engine.submit([msgspec.structs.replace(submission("x", max_tokens=1), prefill_only=True)])
        assert len((await collect(engine, {"x"}))["x"]) == 1

    play(scenario)


def test_prompts_of_a_prefilling_engine_are_chunked_dynamically() -> None:
    """PolyServe section 4.7: just above the budget goes in one piece instead of two."""

    async def scenario(engine: SimulatedEngine) -> None:
        asked = [submission("x", prompt=1025 + 511, max_tokens=5)]
        await engine.submit([msgspec.structs.replace(each, prefill_only=True) for each in asked])
        await first_deltas(engine)
        assert [step.batch_tokens for step in engine.take_steps()] == [1536]

    play(scenario, max_num_batched_tokens=2048)


@pytest.mark.parametrize("policy", batch_policy_names())
def test_everybody_gets_the_tokens_of_its_content(policy: str) -> None:
    async def scenario(engine: SimulatedEngine) -> None:
        sizes = {f"r{i}": (10 + 97 * i % 900, 1 + i % 30) for i in range(40)}
        await engine.submit([submission(name, prompt, count) for name, (prompt, count) in sizes.items()])
        tokens = await collect(engine, set(sizes))
        for name, (_, count) in sizes.items():
            assert tuple(tokens[name]) == simulated_tokens(request_uid(name), 0, count)
        state = engine.state()
        assert (state.busy, state.kv_used_tokens, state.requests) == (False, 0, ())
        steps = engine.take_steps()
        assert len(steps) == state.steps
        assert sum(step.batch_tokens for step in steps) >= sum(p + n - 1 for p, n in sizes.values())

    play(scenario, policy=policy, kv_capacity_tokens=4096, max_num_seqs=16)


def test_what_plans_keep_to_is_told_as_it_was_configured_last() -> None:
    async def scenario(engine: SimulatedEngine) -> None:
        assert engine.state().limits == PlanLimits(32, 512, 0.2, LIVE_STRETCH, 0.4)
        await engine.configure("slo", {"token_budget": 256, "max_iteration_s": 0.05})
        assert engine.state().limits == PlanLimits(32, 256, 0.05, LIVE_STRETCH, 0.0)

    play(scenario, policy_options={"best_effort_share": 0.4}, max_num_batched_tokens=512)


def test_a_stream_continues_elsewhere_with_the_same_tokens() -> None:
    async def scenario(engine: SimulatedEngine) -> None:
        await engine.submit([submission("whole"), submission("other")])
        whole = (await collect(engine, {"whole", "other"}))["whole"]
        rest = Submission("rest", 100, 8, 20, LOOSE, 0.5, 20, request_uid("whole"))
        await engine.submit([rest])
        assert (await collect(engine, {"rest"}))["rest"] == whole[8:]

    play(scenario)
    assert simulated_tokens(7, 3, 5) == simulated_tokens(7, 0, 8)[3:]
    assert simulated_tokens(7, 0, 30) != simulated_tokens(8, 0, 30)
    assert bytes(simulated_tokens(7, 0, 200)).decode().replace(" ", "").isalpha()


def test_iterations_last_as_long_as_the_profile_says() -> None:
    async def scenario(engine: SimulatedEngine) -> None:
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        await engine.submit([submission("r", 500, 60)])
        await collect(engine, {"r"})
        steps = engine.take_steps()
        assert len(steps) == 60
        assert loop.time() - begun_s >= sum(step.seconds for step in steps)

    play(scenario, speed=10.0)


def test_a_request_that_can_no_longer_be_on_time_is_told_so() -> None:
    async def scenario(engine: SimulatedEngine) -> None:
        await engine.submit([submission("hopeless", 4000, 2, Slo(ttft_s=1e-9, tpot_s=1.0)), submission("x")])
        late: dict[str, bool] = {}
        while len(late) < 2:
            late |= {delta.request_id: delta.late for delta in await engine.next_outputs()}
        assert late == {"hopeless": True, "x": False}

    play(scenario)


def test_progress_is_told_while_it_runs_and_an_abort_ends_it() -> None:
    async def scenario(engine: SimulatedEngine) -> None:
        await engine.submit([submission("a", 100, 500), submission("b", 100, 30)])
        emitted = 0
        while emitted < 5:
            emitted += sum(len(delta.token_ids) for delta in await engine.next_outputs() if delta.request_id == "a")
        (progress,) = [p for p in engine.state().requests if p.request_id == "a"]
        assert (progress.emitted_tokens, progress.computed_tokens, progress.running) == (5, 104, True)
        assert engine.state().busy
        await engine.abort(["a", "unknown"])
        assert "a" not in await collect(engine, {"b"})
        assert engine.state().kv_used_tokens == 0

    play(scenario)


def test_what_can_never_fit_is_an_error_of_that_request() -> None:
    async def scenario(engine: SimulatedEngine) -> None:
        await engine.submit([submission("long", prompt=5000), submission("good")])
        (delta,) = await engine.next_outputs()
        assert delta == Delta("long", (), "error", "prompt of 5000 tokens: at most 4095 fit")
        await collect(engine, {"good"})

    play(scenario)


@pytest.mark.parametrize("settings", [{"kv_capacity_tokens": 1024}, {"max_model_len": 1024}])
def test_an_output_ends_where_the_kv_cache_or_the_models_context_does(settings: dict[str, int]) -> None:
    """One that outgrew the cache stood still for good."""

    async def scenario(engine: SimulatedEngine) -> None:
        await engine.submit([submission("big", prompt=900, max_tokens=600)])
        assert len((await collect(engine, {"big"}))["big"]) == 1024 - 900

    play(scenario, **settings)


def test_a_stopped_engine_fails() -> None:
    async def scenario(engine: SimulatedEngine) -> None:
        engine.check()
        waiting = asyncio.create_task(engine.next_outputs())
        await asyncio.sleep(0)
        await engine.stop()
        with pytest.raises(EngineFailure):
            await waiting
        with pytest.raises(EngineFailure):
            engine.check()

    play(scenario)


def test_the_policy_changes_while_it_runs() -> None:
    async def scenario(engine: SimulatedEngine) -> None:
        await engine.submit([submission("a", 100, 300)])
        await engine.next_outputs()
        await engine.configure("sarathi", {"token_budget": 256})
        with pytest.raises(ValueError, match="budget: unknown option"):
            await engine.configure("slo", {"budget": 1})
        await collect(engine, {"a"})

    play(scenario)


def test_what_it_has_done_is_counted_as_vllm_counts() -> None:
    """A prompt counts with its first output token, tokens of an earlier replica as a part of it."""

    async def scenario(engine: SimulatedEngine) -> None:
        await engine.submit([submission("a", prompt=100, max_tokens=20), submission("b", 50, 20, emitted=8)])
        assert engine.state().counts == EngineCounts(waiting=2)
        await first_deltas(engine)
        assert engine.state().counts.running == 2
        await collect(engine, {"a", "b"})
        assert engine.state().counts == EngineCounts(prompt_tokens=158, generation_tokens=32)

    play(scenario)


@pytest.mark.parametrize(("sigma", "is_exact"), [(None, False), (0.0, True), (0.1, False)])
def test_iterations_take_what_the_profile_and_its_spread_say(
    sigma: float | None, is_exact: bool, tmp_path: Path
) -> None:
    """A sigma stands in for the spread; exact engines neither draw nor learn."""
    profile = load_profile("h200_sxm__llama-3.1-8b")
    save_profile(replace(profile, spread=SPREAD), path := tmp_path / "spread.json")

    async def scenario(engine: SimulatedEngine) -> None:
        await engine.submit([submission("x", max_tokens=200)])
        await collect(engine, {"x"})
        steps = [msgspec.structs.astuple(step) for step in engine.take_steps()]
        ratios = [step[5] / iteration_s(profile.coefficients / 200.0, *step[:5]) for step in steps]
        assert len(ratios) == 200
        if is_exact:
            assert ratios == pytest.approx([1.0] * 200)
        else:
            assert 0.02 < np.log(ratios).std() < 0.2

    play(scenario, profile=str(path), iteration_spread=sigma)


def test_a_request_that_is_aborted_in_the_iteration_in_which_it_came_takes_no_part_in_the_next() -> None:
    async def scenario(engine: SimulatedEngine) -> None:
        await engine.submit([submission("a", 100, 40)])
        iterating = asyncio.create_task(engine.next_outputs())
        await asyncio.sleep(0)
        await engine.submit([submission("ghost", 3000, 40)])
        await engine.abort(["ghost"])
        await iterating
        await collect(engine, {"a"})
        assert {step.sequences for step in engine.take_steps()} == {1}
        assert engine.state().kv_used_tokens == 0

    play(scenario)
