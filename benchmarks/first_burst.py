"""What becomes of promises in the first seconds of a fleet: a burst at replicas that have never served anybody.

``python -m benchmarks.first_burst [--starts N] [--json OUT]``. Two engines of the embedded model on this machine's
CPU start, and get three bursts, each of ten prompts of the tightest tier at one instant. By turns with replicas that
run prompts of their own before they serve (``engine.warmup_s``) and with such that do not.
"""

import asyncio
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import numpy as np
import typer
from rich.console import Console

from benchmarks.local_stack import serve_document, serving_stack
from benchmarks.result_file import write_result

TIERS = [
    {"name": "interactive", "ttft_ms": 500, "tpot_ms": 50, "unattainable": "refuse"},
    {"name": "batch", "best_effort": True},
]
REPLICAS, BURSTS, REQUESTS, BETWEEN_S = 2, 3, 10, 3.0
PROMPT_TOKENS, OUTPUT_TOKENS = (200, 900), 24
VARIANTS = {"warmed up": 5.0, "cold": 0.0}


def arguments(warmup_s: float) -> dict[str, Any]:
    """Of the application: the starter's two engines, and no more to do for this machine than they need."""
    return {
        "model": "embedded",
        "engine": {"num_cpus": 0.5, "kv_cache_gib": 0.1, "warmup_s": warmup_s},
        "fleet": {"num_replicas": REPLICAS},
        "ingress": {"num_cpus": 0.2},
    }


async def play(url: str, seed: int) -> list[list[dict[str, Any]]]:
    """Each burst's verdicts of requests that were promised."""
    random, bursts = np.random.default_rng(seed), list[list[dict[str, Any]]]()
    async with aiohttp.ClientSession() as session:

        async def ask(prompt: list[int]) -> dict[str, Any]:
            body = {"model": "embedded", "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True}
            async with session.post(f"{url}/v1/completions", json=body) as response:
                return dict((await response.json()).get("slo") or {})

        for _ in range(BURSTS):
            prompts = [random.integers(10, 200, random.integers(*PROMPT_TOKENS)).tolist() for _ in range(REQUESTS)]
            verdicts = await asyncio.gather(*map(ask, prompts))
            bursts.append([slo for slo in verdicts if slo.get("promised")])
            await asyncio.sleep(BETWEEN_S)
    return bursts


def to_point(variant: str, seed: int, number: int, promised: list[dict[str, Any]]) -> dict[str, Any]:
    """One burst of one start; ``expected`` is how many were to be kept by the chances told."""
    return {
        "variant": variant,
        "seed": seed,
        "burst": number,
        "promised": len(promised),
        "kept": sum(bool(slo["met"]) for slo in promised),
        "expected": round(sum(slo["ttft_chance"] for slo in promised), 2),
        "predicted_ttft_ms": [round(slo["predicted_ttft_ms"]) for slo in promised],
        "ttft_ms": [round(slo["ttft_ms"]) for slo in promised],
    }


def share_kept(points: list[dict[str, Any]], variant: str, burst: int) -> float:
    """Of all starts' promises in the bursts of this number."""
    chosen = [point for point in points if (point["variant"], point["burst"]) == (variant, burst)]
    return sum(point["kept"] for point in chosen) / max(1, sum(point["promised"] for point in chosen))


def main(
    starts: Annotated[int, typer.Option(min=1, help="How often each variant starts.")] = 6,
    json_path: Annotated[Path | None, typer.Option("--json", help="Where the result goes.")] = None,
) -> None:
    """Print what was promised and kept, burst by burst."""
    console, points = Console(stderr=True, quiet=True), list[dict[str, Any]]()
    for seed in range(starts):
        for variant, warmup_s in VARIANTS.items():
            document = serve_document(arguments(warmup_s), TIERS, default_tier="interactive")
            with serving_stack(document, REPLICAS, console) as url:
                for number, promised in enumerate(asyncio.run(play(url, seed))):
                    points.append(to_point(variant, seed, number, promised))
                    print(points[-1], flush=True)
    headline = {
        f"kept of promised, burst {burst + 1}, {variant}": round(share_kept(points, variant, burst), 3)
        for variant in VARIANTS
        for burst in range(BURSTS)
    }
    headline |= {
        f"promised in all, {variant}": sum(point["promised"] for point in points if point["variant"] == variant)
        for variant in VARIANTS
    }
    for name, value in headline.items():
        print(f"{name}: {value}")
    if json_path is not None:
        config = {"bursts": BURSTS, "requests": REQUESTS, "prompt_tokens": PROMPT_TOKENS, "tiers": TIERS}
        write_result(json_path, "first-burst", config=config, seeds=range(starts), headline=headline, points=points)


if __name__ == "__main__":
    typer.run(main)
