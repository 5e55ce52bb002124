"""One engine of ``benchmarks.engine_slo`` and the runs on it: traffic in, times of tokens out, nothing judged."""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import time

from benchmarks.engine_figures import STOCK
from benchmarks.engine_traffic import CLASSES, GPU_CLASSES, Job, make_jobs, middle_rate, summarize
from protocol.messages import Slo, Submission
from replicas.config import ReplicaConfig

CHUNKS = {"auto": (64, 128, 256, 512), "timed": (512, 1024, 2048, 4096, 8192)}  # Sarathi's fixed budgets that are tried
# After the window, for what is under way: at least so many seconds, and so many times the longest request's time alone.
GRACE_S, GRACE_TIMES = 3.0, 3.0
STALL_S = 0.5  # a run during which this process was kept from running for so long is repeated
ATTEMPTS = 5
ALONE_RUNS = 5
CAPACITY_SEED = 20_000
CROWD = 256  # requests running while the cost of planning is measured
BURSTS = {"auto": (180, 3), "timed": (720, 1)}  # requests of the capacity measurement, and how often
QUICK_BURSTS, QUICK_CHUNKS = {"auto": (120, 1), "timed": (720, 1)}, {"auto": (256,), "timed": (1024,)}


def submission(name: str, job: Job, age_s: float) -> Submission:
    """A job as the engine takes it."""
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    from replicas.vllm_codec import encode_request

    params = SamplingParams(temperature=0.0, max_tokens=job.max_tokens, ignore_eos=True)
    payload = encode_request(EngineCoreRequest(name, job.prompt, None, params, None, 0.0, None, None, None))
    return Submission(name, len(job.prompt), 0, job.max_tokens, job.slo, age_s, job.max_tokens, 0, payload)


class Bench:
    """One engine and the runs on it."""

    def __init__(self, config: ReplicaConfig, quick: bool = False) -> None:
        from replicas.vllm_engine import VllmEngine

        self.engine = VllmEngine(config)
        self.classes = GPU_CLASSES if config.is_timed else CLASSES
        self.chunks, self.burst = CHUNKS[config.device], BURSTS[config.device]
        self.attempts, self.alone_runs = ATTEMPTS, ALONE_RUNS
        if quick:
            self.chunks, self.burst = QUICK_CHUNKS[config.device], QUICK_BURSTS[config.device]
            self.attempts, self.alone_runs = 2, 1
        self.grace_s = GRACE_S
        self.runs = 0
        self.stalled_s = 0.0

    async def run(self, jobs: list[Job], until_s: float) -> float:
        """Play ``jobs``; stops at ``until_s`` or when all have finished. Returns the seconds that it took.

        ``stalled_s`` tells afterwards for how long this process did not get to run: nothing measured then counts.
        """
        self.runs += 1
        names = {f"{self.runs}-{i}": job for i, job in enumerate(jobs)}
        begun_s = time.monotonic()
        works = [asyncio.create_task(work) for work in (self._send(names, begun_s), self._read(names, begun_s))]
        watcher = asyncio.create_task(self._watch())
        await asyncio.wait(works, timeout=until_s)
        took_s = time.monotonic() - begun_s
        for task in (*works, watcher):
            task.cancel()
        for ended in await asyncio.gather(*works, watcher, return_exceptions=True):
            if isinstance(ended, Exception):
                raise ended
        await self.engine.abort([name for name, job in names.items() if not job.finished])
        while self.engine.state().kv_used_tokens:
            await asyncio.sleep(0.01)
        return took_s

    async def _send(self, names: dict[str, Job], begun_s: float) -> None:
        for name, job in names.items():
            await asyncio.sleep(begun_s + job.arrival_s - time.monotonic())
            age_s = max(0.0, time.monotonic() - begun_s - job.arrival_s)
            await self.engine.submit([submission(name, job, age_s)])

    async def _read(self, names: dict[str, Job], begun_s: float) -> None:
        left = set(names)
        while left:
            for delta in await self.engine.next_outputs():
                job = names[delta.request_id]
                since_s = time.monotonic() - begun_s - job.arrival_s
                job.times_s += [since_s] * len(delta.token_ids)
                if delta.finish:
                    job.finished = True
                    left.discard(delta.request_id)

    async def _watch(self) -> None:
        last_s, self.stalled_s = time.monotonic(), 0.0
        while True:
            await asyncio.sleep(0.02)
            last_s, before_s = time.monotonic(), last_s
            self.stalled_s = max(self.stalled_s, last_s - before_s)

    async def run_undisturbed(self, rate: float, seconds: float, slos: dict[str, Slo], seed: int) -> dict[str, float]:
        """A run of the mix, repeated while something else keeps this process from running; what it attained."""
        for _ in range(self.attempts):
            jobs = make_jobs(rate, seconds, slos, seed, self.classes)
            took_s = await self.run(jobs, seconds + self.grace_s)
            if self.stalled_s < STALL_S:
                break
        disturbance = {"stalled_s": self.stalled_s, "machine_load": os.getloadavg()[0]}
        return summarize(jobs, took_s) | disturbance

    async def measure_alone(self) -> dict[str, tuple[float, float]]:
        """TTFT and TPOT of each class without company, medians, seconds; the grace of later runs follows them."""
        alone = {}
        for kind in self.classes:
            prompt, output = (sum(sizes) // 2 for sizes in (kind.prompt_tokens, kind.output_tokens))
            ttfts, tpots = [], []
            for seed in range(self.alone_runs):
                choose = random.Random(seed)
                job = Job(kind, Slo(best_effort=True), 0.0, [choose.randrange(32, 127) for _ in range(prompt)], output)
                await self.run([job], 60.0)
                ttfts.append(job.times_s[0])
                tpots.append((job.times_s[-1] - job.times_s[0]) / (output - 1))
            ttft_s, tpot_s = alone[kind.name] = statistics.median(ttfts), statistics.median(tpots)
            self.grace_s = max(self.grace_s, GRACE_TIMES * (ttft_s + kind.output_tokens[1] * tpot_s))
        return alone

    async def measure_capacity(self, slos: dict[str, Slo]) -> float:
        """Requests per second that the stock scheduler finishes in the middle third of a burst, median of the runs.

        The batch is built before and empties after it, so that neither counts.
        """
        await self.engine.configure(STOCK, {})
        requests, runs = self.burst
        rates = []
        for seed in range(runs):
            burst = make_jobs(1e4, 1.0, slos, CAPACITY_SEED + seed, self.classes)[:requests]
            await self.run(burst, 240.0)
            rates.append(middle_rate([job.arrival_s + job.times_s[-1] for job in burst if job.finished]))
        return statistics.median(rates)

    async def measure_planning(self) -> dict[str, float]:
        """Microseconds per step of planning and applying the plan, with ``CROWD`` requests running."""
        await self.engine.configure("slo", {})
        slos = (Slo(60.0, 1.0), Slo(60.0, 0.5))
        jobs = [Job(self.classes[0], slos[i % 2], 0.0, [32 + i % 90] * 16, 60) for i in range(CROWD)]
        running = asyncio.create_task(self.run(jobs, 120.0))
        while sum(bool(job.times_s) for job in jobs) < CROWD:
            await asyncio.sleep(0.01)
        costs_s: list[float] = []
        steps, planning_s = self.engine.state().steps, self.engine.planning_s
        while not any(job.finished for job in jobs):
            await asyncio.sleep(0.001)
            if (now := self.engine.state().steps) > steps:
                costs_s.append((self.engine.planning_s - planning_s) / (now - steps))
                steps, planning_s = now, self.engine.planning_s
        await running
        ranks = statistics.quantiles(costs_s, n=100)
        return {"shaping_us_p50_256": 1e6 * ranks[49], "shaping_us_p99_256": 1e6 * ranks[98]}


async def measure_shaping(config: ReplicaConfig) -> list[dict[str, float]]:
    """What planning and applying a step costs in a fresh engine, twice."""
    bench = Bench(config)
    await bench.engine.start()
    try:
        return [await bench.measure_planning() for _ in range(2)]
    finally:
        await bench.engine.stop()
