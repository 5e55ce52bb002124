"""What this project's scheduler adds to a step of vLLM's: processor time of ``schedule()`` with it and without.

One engine process over a timed device keeps a number of requests running; whoever ends is replaced. The same process
takes turns: a while with the plan (planning, applying, following), a while with vLLM's own ``schedule()`` and nothing
of this project in it. Time is that of the scheduler's thread, so waiting for a core does not count. What vLLM asks
this project for each request, within its own ``schedule()``, is measured apart and counted as added.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import MethodType
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput

from benchmarks.engine_figures import LEAST_SHARE, OURS, STOCK, costs_of
from benchmarks.engine_runs import submission
from benchmarks.engine_traffic import Class, Job
from protocol.messages import Slo
from replicas.config import ReplicaConfig
from replicas.vllm_scheduler import SloScheduler

SCHEDULER, OUT = "benchmarks.engine_steps.MeteredScheduler", "POLYSLO_STEP_COSTS"  # OUT: file, by the environment
HOOK = "_reserve_prefill_lookahead"  # of this project in vLLM's ``schedule()``
TURN_STEPS = 24
PROMPT_TOKENS, OUTPUT_TOKENS = (16, 128), (200, 800)
KIND = Class("crowd", 1.0, PROMPT_TOKENS, OUTPUT_TOKENS)
SLOS = (Slo(5.0, 1.0), Slo(5.0, 0.5), Slo(5.0, 1.0), Slo(5.0, 0.5), Slo(best_effort=True))  # none of them binds


class OwnScheduler(AsyncScheduler):
    """vLLM's, with a watch: on all of it, and on what it is asked through ``HOOK`` for every running request."""

    own_s = hook_s = aside_s = 0.0  # of the last step: vLLM's, the hook beyond vLLM's own, measuring that

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        begun_s = time.thread_time()
        ours, stock = getattr(self, HOOK), MethodType(getattr(AsyncScheduler, HOOK), self)
        self.hook_s = self._asking_s(ours) - self._asking_s(stock)
        own_begun_s = time.thread_time()
        self.aside_s = own_begun_s - begun_s
        output = super().schedule(throttle_prefills)
        self.own_s = time.thread_time() - own_begun_s
        return output

    def _asking_s(self, hook: Callable[..., int]) -> float:
        begun_s = time.thread_time()
        for request in self.running:
            hook(request, request.num_computed_tokens, 1)
        return time.thread_time() - begun_s


class MeteredScheduler(SloScheduler, OwnScheduler):
    """Notes what each ``schedule()`` costs; while its policy is vLLM's it is vLLM's, without this project's hook."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._costs: list[tuple[float, float, int]] = []  # of this turn: seconds added, vLLM's, requests in the step

    def polyslo_configure(self, policy: str, options: dict[str, float]) -> None:
        """A new turn."""
        turn = {"policy": self._planner.policy.name, "steps": self._costs}
        with open(os.environ[OUT], "a", encoding="utf-8") as lines:
            lines.write(json.dumps(turn) + "\n")
        self._costs = []
        super().polyslo_configure(policy, options)
        if policy == STOCK:
            self.__dict__[HOOK] = MethodType(getattr(AsyncScheduler, HOOK), self)
        else:
            self.__dict__.pop(HOOK, None)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        is_stock, now_s, begun_s = self._planner.policy.name == STOCK, time.monotonic(), time.thread_time()
        form = OwnScheduler.schedule if is_stock else SloScheduler.schedule
        output = form(self, throttle_prefills)
        around_s = time.thread_time() - begun_s - self.own_s - self.aside_s
        self._costs.append((around_s + self.hook_s, self.own_s, len(output.num_scheduled_tokens)))
        if is_stock:
            self._begin_step(now_s, output, 0.0, None)  # not counted: what is in flight, for the next turn
        return output


async def measure_steps(profile: str, crowds: Sequence[int], core: int = -1, turns: int = 24) -> list[dict[str, Any]]:
    """A point per crowd, growing: both costs of a step with so many requests running (``costs_of``)."""
    from replicas.vllm_engine import VllmEngine

    config = ReplicaConfig(
        device="timed",
        profile=profile,
        cores=(core,) if core >= 0 else (),
        max_num_seqs=max(crowds),
        max_num_batched_tokens=8192,
        engine_kwargs={"scheduler_cls": SCHEDULER},
    )
    with tempfile.TemporaryDirectory() as folder:
        os.environ[OUT] = os.path.join(folder, "turns")
        try:
            await take_turns(VllmEngine(config), crowds, turns)
            spent = [*read_turns(os.environ[OUT])]
        finally:
            del os.environ[OUT]
    parts = [spent[k * (turns + 2) + 2 :][:turns] for k in range(len(crowds))]  # two are of the time before
    found = zip(crowds, parts, strict=True)
    return [{"profile": profile, "running": crowd, **costs_of(own, crowd)} for crowd, own in found]


async def take_turns(engine: Any, crowds: Sequence[int], turns: int) -> None:
    """On a fresh engine, for each crowd: fill it, then let plan and vLLM's own order take turns."""
    await engine.start()
    added = asyncio.Queue[int]()
    keeping = asyncio.create_task(keep_running(engine, added))

    async def wait_for(figure: Callable[[], float], least: float) -> None:
        while figure() < least:
            await asyncio.wait([keeping], timeout=0.02)
            if keeping.done():
                await keeping

    def begun() -> int:
        return sum(progress.emitted_tokens > 0 for progress in engine.state().requests)

    try:
        for before, crowd in zip((0, *crowds), crowds, strict=False):
            await engine.configure(STOCK, {})  # which starts all at once
            added.put_nowait(crowd - before)
            await wait_for(begun, LEAST_SHARE * crowd)
            for turn in range(turns + 1):
                await engine.configure((OURS, STOCK)[turn % 2], {})
                await wait_for(lambda: engine.state().steps, engine.state().steps + TURN_STEPS)
        assert not engine.state().planner_failures, "vLLM's own order stood in for the plan"
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        await engine.stop()


def read_turns(path: str) -> Iterator[dict[str, Any]]:
    """What the scheduler wrote."""
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        yield json.loads(line)


async def keep_running(engine: Any, added: asyncio.Queue[int]) -> None:
    """Submit as many as are ``added``, and another request for each that ends."""
    jobs = draw_jobs(random.Random(0))
    names = (f"step-{number}" for number in range(1 << 30))

    async def submit(count: int) -> None:
        await engine.submit([submission(next(names), next(jobs), 0.0) for _ in range(count)])

    await submit(await added.get())
    while True:
        ended = sum(bool(delta.finish) for delta in await engine.next_outputs())
        while not added.empty():
            ended += added.get_nowait()
        if ended:
            await submit(ended)


def draw_jobs(choose: random.Random) -> Iterator[Job]:
    """Short prompts and outputs of all lengths, four of five with an objective."""
    while True:
        prompt = [choose.randrange(32, 127) for _ in range(choose.randint(*PROMPT_TOKENS))]
        yield Job(KIND, choose.choice(SLOS), 0.0, prompt, choose.randint(*OUTPUT_TOKENS))
