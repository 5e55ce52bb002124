"""SLO attainment of one real vLLM engine on a CPU under different batch policies, interleaved on the same engine.

A mix of tight, loose and best-effort requests arrives open loop at shares of the engine's capacity. Objectives are
multiples of what each class measures when it has the engine to itself, so that they mean the same on any machine. The
policies take turns on one engine process (they change at run time), every one with the same arrivals; there is no
admission control here. Requests that have not finished when the window and its grace end count as missed.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.engine_traffic import CLASSES, GPU_CLASSES, Job, make_jobs, summarize, to_slos
from benchmarks.result_file import write_result
from protocol.messages import Slo, Submission
from replicas.config import ReplicaConfig

POLICIES = ("vllm", "sarathi", "slo")
STOCK = "vllm"
LOADS = (0.6, 0.8, 1.0, 1.2, 1.5)
CHUNKS = {"auto": (64, 128, 256, 512), "timed": (512, 1024, 2048, 4096, 8192)}  # Sarathi's fixed budgets that are tried
GRACE_S = 3.0  # after the window, for what is under way
STALL_S = 0.5  # a run during which this process was kept from running for so long is repeated
ATTEMPTS = 5
TARGET = 0.9  # attainment at which goodput is read
ALONE_RUNS = 5
CROWD = 256  # requests running while the cost of planning is measured
BURSTS = {"auto": (60, 5), "timed": (240, 2)}  # requests of the capacity measurement, and how often


class Bench:
    """One engine and the runs on it."""

    def __init__(self, config: ReplicaConfig) -> None:
        from replicas.vllm_engine import VllmEngine

        self.engine = VllmEngine(config)
        self.classes = GPU_CLASSES if config.is_timed else CLASSES
        self.chunks, self.burst = CHUNKS[config.device], BURSTS[config.device]
        self.runs = 0
        self.stalled_s = 0.0

    def _submission(self, name: str, job: Job, age_s: float) -> Submission:
        from vllm import SamplingParams
        from vllm.v1.engine import EngineCoreRequest

        from replicas.vllm_codec import encode_request

        params = SamplingParams(temperature=0.0, max_tokens=job.max_tokens, ignore_eos=True)
        payload = encode_request(EngineCoreRequest(name, job.prompt, None, params, None, 0.0, None, None, None))
        return Submission(name, len(job.prompt), 0, job.max_tokens, job.slo, age_s, job.max_tokens, 0, payload)

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
            await self.engine.submit([self._submission(name, job, age_s)])

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
        for _ in range(ATTEMPTS):
            jobs = make_jobs(rate, seconds, slos, seed, self.classes)
            took_s = await self.run(jobs, seconds + GRACE_S)
            if self.stalled_s < STALL_S:
                break
        disturbance = {"stalled_s": self.stalled_s, "machine_load": os.getloadavg()[0]}
        return summarize(jobs, took_s) | disturbance

    async def measure_alone(self) -> dict[str, tuple[float, float]]:
        """TTFT and TPOT of each class without company, medians, seconds."""
        alone = {}
        for kind in self.classes:
            prompt, output = (sum(sizes) // 2 for sizes in (kind.prompt_tokens, kind.output_tokens))
            ttfts, tpots = [], []
            for seed in range(ALONE_RUNS):
                choose = random.Random(seed)
                job = Job(kind, Slo(best_effort=True), 0.0, [choose.randrange(32, 127) for _ in range(prompt)], output)
                await self.run([job], 60.0)
                ttfts.append(job.times_s[0])
                tpots.append((job.times_s[-1] - job.times_s[0]) / (output - 1))
            alone[kind.name] = statistics.median(ttfts), statistics.median(tpots)
        return alone

    async def measure_capacity(self, slos: dict[str, Slo]) -> float:
        """Requests per second of the mix that the stock scheduler sustains when it is never idle."""
        await self.engine.configure(STOCK, {})
        requests, runs = self.burst
        bursts = [make_jobs(1e4, 1.0, slos, 0, self.classes)[:requests] for _ in range(runs)]
        return requests / statistics.median([await self.run(burst, 120.0) for burst in bursts])

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


def goodput(points: list[dict[str, Any]], policy: str, capacity: float) -> float:
    """Highest rate of requests at which the mean attainment is ``TARGET``, between the loads that were run."""
    loads = sorted({point["load"] for point in points})
    means = [mean_of(points, policy, load, "attained") for load in loads]
    if means[0] < TARGET:
        return 0.0
    for low, high, above, below in zip(loads, loads[1:], means, means[1:], strict=False):
        if below < TARGET:
            return capacity * (low + (high - low) * (above - TARGET) / (above - below))
    return capacity * loads[-1]


def mean_of(points: list[dict[str, Any]], policy: str, load: float, what: str) -> float:
    """Mean over the seeds of one figure."""
    return statistics.fmean(p[what] for p in points if p["policy"] == policy and p["load"] == load and what in p)


async def choose_chunk(bench: Bench, capacity: float, slos: dict[str, Slo], seconds: float) -> int:
    """Sarathi's best budget at full load, on arrivals that are not used again."""
    attained = {}
    for chunk in bench.chunks:
        await bench.engine.configure("sarathi", {"token_budget": chunk})
        attained[chunk] = (await bench.run_undisturbed(capacity, seconds, slos, seed=10_000))["attained"]
    return max(bench.chunks, key=lambda chunk: attained[chunk])


async def measure(
    config: ReplicaConfig, loads: list[float], seeds: int, seconds: float, options: dict[str, float], console: Console
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """All runs; returns what was measured beforehand and one record per run."""
    bench = Bench(config)
    await bench.engine.start()
    try:
        alone = await bench.measure_alone()
        slos = to_slos(alone, bench.classes)
        capacity = await bench.measure_capacity(slos)
        chunk = await choose_chunk(bench, capacity, slos, seconds)
        setting = {
            "alone": alone,
            "capacity_per_s": capacity,
            "sarathi_token_budget": chunk,
            "classes": [vars(kind) for kind in bench.classes],
            **await bench.measure_planning(),
        }
        console.print(setting, {name: (slo.ttft_s, slo.tpot_s) for name, slo in slos.items()})
        per_policy = {"sarathi": {"token_budget": float(chunk)}, "slo": options}
        points = []
        for seed in range(seeds):
            for load in loads:
                for turn in range(len(POLICIES)):
                    policy = POLICIES[(turn + seed) % len(POLICIES)]
                    await bench.engine.configure(policy, per_policy.get(policy, {}))
                    result = await bench.run_undisturbed(capacity * load, seconds, slos, seed)
                    points.append({"policy": policy, "load": load, "seed": seed, **result})
                    console.print(f"seed {seed} load {load} {policy}: {points[-1]['attained']:.3f}")
        return setting, points
    finally:
        await bench.engine.stop()


def headline(points: list[dict[str, Any]], capacity: float) -> dict[str, float]:
    """The figures that the project quotes."""
    rates = {policy: goodput(points, policy, capacity) for policy in POLICIES}
    loads = sorted({point["load"] for point in points})
    result = {f"goodput90_{policy}_per_s": rate for policy, rate in rates.items()}
    for rival, name in ((STOCK, "stock"), ("sarathi", "sarathi")):
        if rates[rival]:
            result[f"goodput90_ratio_vs_{name}"] = rates["slo"] / rates[rival]
        else:  # below the target at the least load that was run: its goodput is less than that load
            result[f"goodput90_ratio_vs_{name}_at_least"] = rates["slo"] / (capacity * loads[0])
    gaps = {load: mean_of(points, "slo", load, "attained") - mean_of(points, STOCK, load, "attained") for load in loads}
    result["attainment_gain_worst"] = min(gaps.values())
    if 1.0 in gaps:
        result["attainment_gain_at_1.0"] = gaps[1.0]
    for what in ("tokens_per_s", "best_effort_tokens"):
        ratios = [mean_of(points, "slo", load, what) / max(mean_of(points, STOCK, load, what), 1.0) for load in loads]
        result[f"{what}_ratio"], result[f"{what}_ratio_worst"] = statistics.fmean(ratios), min(ratios)
    return result


def to_rich(points: list[dict[str, Any]]) -> Table:
    """One line per load and policy: means over the seeds, and the spread of the attainment."""
    names = ["attained", *(f"attained {kind.name}" for kind in CLASSES if kind.ttft_times)]
    names += ["tokens_per_s", "best_effort_tokens", "best_effort_finished", "machine_load"]
    table = Table("load", "policy", *names, "spread")
    for load in sorted({point["load"] for point in points}):
        for policy in POLICIES:
            all_of = [p["attained"] for p in points if p["policy"] == policy and p["load"] == load]
            cells = [f"{mean_of(points, policy, load, name):.3f}" for name in names]
            table.add_row(f"{load}", policy, *cells, f"{min(all_of):.2f} to {max(all_of):.2f}")
    return table


def main(  # noqa: PLR0913  (a command: its options)
    json_path: Annotated[Path | None, typer.Option("--json", help="result file")] = None,
    seeds: Annotated[int, typer.Option(help="runs per load and policy")] = 5,
    seconds: Annotated[float, typer.Option(help="window of arrivals")] = 15.0,
    loads: Annotated[str, typer.Option(help="shares of the capacity")] = ",".join(map(str, LOADS)),
    max_iteration_s: Annotated[float, typer.Option(help="the planner's cap on one iteration")] = 0.2,
    best_effort_stretch: Annotated[float, typer.Option(help="how far best effort may prolong an iteration")] = 8.0,
    core: Annotated[int, typer.Option(help="core of the engine; -1: any free one")] = -1,
    device: Annotated[str, typer.Option(help="auto: this CPU; timed: as long as a profile says")] = "auto",
    profile: Annotated[str, typer.Option(help="of the timed device")] = "h200_sxm__llama-3.1-8b",
    steps_in_flight: Annotated[int, typer.Option(help="of the timed device; 1: synchronous scheduling")] = 2,
    spread: Annotated[float, typer.Option(help="sigma by which the timed device differs from its profile")] = 0.1,
    speed: Annotated[float, typer.Option(help="of the timed device, times the profile's")] = 1.0,
    shaping: Annotated[bool, typer.Option("--shaping", help="only the cost of a step, 256 requests running")] = False,
) -> None:
    """Compare policies on the embedded model, or on a GPU that a timed device stands for."""
    common: dict[str, Any] = dict(cores=(core,) if core >= 0 else (), enable_prefix_caching=False, max_num_seqs=CROWD)
    gpu: dict[str, Any] = dict(profile=profile, steps_in_flight=steps_in_flight, iteration_spread=spread, speed=speed)
    sizes: dict[str, Any] = {"timed": dict(max_model_len=8192, max_num_batched_tokens=8192, device="timed", **gpu)}
    config = ReplicaConfig(**common, **sizes.get(device, {"max_model_len": 2048, "device": device}))
    console = Console(width=160)
    if shaping:
        console.print(asyncio.run(measure_shaping(config)))
        return
    options = {"max_iteration_s": max_iteration_s, "best_effort_stretch": best_effort_stretch}
    setting, points = asyncio.run(measure(config, [*map(float, loads.split(","))], seeds, seconds, options, console))
    console.print(to_rich(points))
    figures = headline(points, setting["capacity_per_s"])
    figures |= {name: value for name, value in setting.items() if name.startswith("shaping_us")}
    console.print(figures)
    if json_path:
        described = {"device": device, **gpu, "seconds": seconds, "options": options, **setting}
        write_result(json_path, "engine_slo", config=described, seeds=range(seeds), headline=figures, points=points)


if __name__ == "__main__":
    typer.run(main)
