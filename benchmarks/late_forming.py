"""Newcomers' TTFT beside running decodes, on vLLM's own engine core: the next step formed at once, late, synchronously.

``python -m benchmarks.late_forming --json OUT``. Timed devices take as long as the profile's GPU does, 10 % more or
less. Two engines, one with asynchronous scheduling and one without, take turns; the first of them in two settings.
``at once`` is vLLM's way: the next step is formed when the one before begins.
"""

import asyncio
import random
import time
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.engine_runs import submission
from benchmarks.engine_traffic import CLASSES, Job
from benchmarks.result_file import write_result
from planning.limits import newcomer_share
from protocol.messages import Slo, Submission
from replicas.config import ReplicaConfig
from replicas.vllm_engine import VllmEngine

PROFILES = ("h200_sxm__llama-3.1-8b", "h100_sxm__llama-3.1-70b__tp4")
DECODES, PROMPT_TOKENS, OUTPUT_TOKENS = 150, 400, 1400  # that run all the time
NEWCOMER_TOKENS, GAP_S = 120, (0.08, 0.16)  # prompts of newcomers, and seconds between two of them
WARM_UP_S, SECONDS, ROUNDS = 2.0, 12.0, 3
AT_ONCE, LATE, SYNCHRONOUS = "at once", "late", "synchronous"
# Steps in flight, and options of the policy: a lead longer than any step forms the next one at once.
SETTINGS: dict[str, tuple[int, dict[str, float]]] = {
    AT_ONCE: (2, {"lead_s": 10.0, "newcomer_share": newcomer_share(2)}),
    LATE: (2, {}),
    SYNCHRONOUS: (1, {}),
}


def made(name: str, rng: random.Random, prompt_tokens: int, output_tokens: int, slo: Slo) -> Submission:
    """A request with a prompt of its own."""
    prompt = [rng.randrange(5, 250) for _ in range(prompt_tokens)]
    return submission(name, Job(CLASSES[0], slo, 0.0, prompt, output_tokens), 0.0)


async def run(engine: VllmEngine, label: str) -> dict[str, float]:
    """TTFT of those who come while decodes run, in milliseconds, and how many steps per second the engine makes."""
    rng, loose, tight = random.Random(1), Slo(ttft_s=60.0, tpot_s=1.0, tier="loose"), Slo(ttft_s=0.3, tpot_s=0.5)
    decodes = [f"{label}-decode-{i}" for i in range(DECODES)]
    await engine.submit([made(name, rng, PROMPT_TOKENS, OUTPUT_TOKENS, loose) for name in decodes])
    begun_s, sent_s, ttft_s = time.monotonic(), dict[str, float](), dict[str, float]()
    next_s, counted = begun_s + WARM_UP_S, (0, begun_s)
    while time.monotonic() < begun_s + SECONDS:
        if time.monotonic() >= next_s:
            if not sent_s:
                counted = engine.state().steps, time.monotonic()
            name = f"{label}-new-{len(sent_s)}"
            sent_s[name] = time.monotonic()
            await engine.submit([made(name, rng, NEWCOMER_TOKENS, 1, tight)])
            next_s = sent_s[name] + rng.uniform(*GAP_S)
        for delta in await outputs(engine, max(1e-3, next_s - time.monotonic())):
            if delta.request_id in sent_s and delta.token_ids:
                ttft_s.setdefault(delta.request_id, time.monotonic() - sent_s[delta.request_id])
    steps = engine.state().steps - counted[0]
    steps_per_s = steps / (time.monotonic() - counted[1])
    await engine.abort(decodes)
    while await outputs(engine, 0.5):
        pass
    median, most = np.quantile(list(ttft_s.values()), (0.5, 0.99)) * 1e3
    return {
        "ttft_p50_ms": round(float(median), 2),
        "ttft_p99_ms": round(float(most), 2),
        "steps_per_s": round(steps_per_s, 2),
    }


async def outputs(engine: VllmEngine, seconds: float) -> list[Any]:
    """What the engine says next; nothing, after so many seconds."""
    try:
        return list(await asyncio.wait_for(engine.next_outputs(), seconds))
    except TimeoutError:
        return []


async def measure(profile: str) -> list[dict[str, Any]]:
    """Every setting in turn, ``ROUNDS`` times."""
    gpu: dict[str, Any] = dict(device="timed", profile=profile, iteration_spread=0.1)
    sizes: dict[str, Any] = dict(max_num_seqs=256, max_num_batched_tokens=4096, max_model_len=4096)
    engines = {steps: VllmEngine(ReplicaConfig(**gpu, **sizes, steps_in_flight=steps)) for steps in (1, 2)}
    points = []
    try:
        for engine in engines.values():
            await engine.start()
        for turn, (name, (steps, options)) in product(range(ROUNDS), SETTINGS.items()):
            await engines[steps].configure("slo", options)
            figures = await run(engines[steps], f"{turn}-{name}")
            points.append({"profile": profile, "setting": name, "turn": turn, **figures})
            print(points[-1], flush=True)
    finally:
        for engine in engines.values():
            await engine.stop()
    return points


def headline(points: list[dict[str, Any]]) -> dict[str, float]:
    """Ratios to forming at once, of the same turn: medians over turns."""
    found = {}
    known = {(p["profile"], p["setting"], p["turn"]): p for p in points}
    for profile, name in product(dict.fromkeys(p["profile"] for p in points), (LATE, SYNCHRONOUS)):
        pairs = [(known[profile, name, turn], known[profile, AT_ONCE, turn]) for turn in range(ROUNDS)]
        for figure in ("ttft_p50_ms", "ttft_p99_ms", "steps_per_s"):
            ratio = np.median([own[figure] / at_once[figure] for own, at_once in pairs])
            found[f"{profile}, {name}, {figure}"] = round(float(ratio), 3)
    return found


def main(json: Annotated[Path | None, typer.Option(help="Result file.")] = None) -> None:
    """Measure, print and write."""
    points = [point for profile in PROFILES for point in asyncio.run(measure(profile))]
    config = {"decodes": DECODES, "seconds": SECONDS, "gap_s": GAP_S}
    found = headline(points)
    print(found)
    if json is not None:
        write_result(json, "late_forming", config=config, seeds=(1,), headline=found, points=points)


if __name__ == "__main__":
    typer.run(main)
