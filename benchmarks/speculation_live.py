"""Objectives that only speculation makes attainable, through the whole stack.

``python -m benchmarks.speculation_live --json OUT``. One replica of vLLM's engine core over a timed device, which
accepts seven of ten draft tokens, behind HTTP. Tier ``tight`` asks for tokens in 0.7 times the least time of an
iteration. First come streams that need no drafts, then groups of tight requests at once. Stacks with and without
drafts take turns.
"""

import statistics
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import openai
import typer
from rich.console import Console

from benchmarks.local_stack import serve_document, serving_stack
from benchmarks.result_file import write_result
from profiles.kernels import iteration_s
from profiles.store import load_profile

PROFILE, SPEED, PACE = "h200_sxm__llama-3.1-8b", 0.25, 0.7  # the device is slow enough for two cores to follow
DRAFTS = (0, 4)
WARM_UP, WARM_UP_TOKENS, TOKENS = 12, 500, 300
GROUPS = (1, 4, 16)


def args(drafts: int) -> dict[str, Any]:
    """The application with so many draft tokens per step."""
    engine = {"device": "timed", "num_cpus": 0.5, "speed": SPEED, "speculation": {"num_speculative_tokens": drafts}}
    return {"profile": PROFILE, "engine": {"kind": "vllm", **engine}, "fleet": {"num_replicas": 1}}


def tiers(tpot_ms: float) -> list[dict[str, Any]]:
    """One that an iteration per token is too slow for, one that it is not, and best effort."""
    tight = {"name": "tight", "ttft_ms": 1500, "tpot_ms": tpot_ms, "unattainable": "refuse"}
    return [tight, {"name": "standard", "ttft_ms": 8000, "tpot_ms": 500}, {"name": "batch", "best_effort": True}]


def ask(client: openai.OpenAI, tier: str, number: int, tokens: int) -> dict[str, Any]:
    """The verdict on one request; empty where it is refused."""
    try:
        answer = client.completions.create(
            model="embedded",
            prompt=f"{tier} request number {number}. " * 8,
            max_tokens=tokens,
            temperature=0,
            extra_body={"ignore_eos": True},
            extra_headers={"x-slo-tier": tier},
        )
    except openai.RateLimitError:
        return {}
    return dict((answer.model_extra or {})["slo"])


def play(drafts: int, tpot_ms: float, seed: int) -> list[dict[str, Any]]:
    """One stack: a point per group of tight requests that come at once."""
    document = serve_document(args(drafts), tiers(tpot_ms))
    points: list[dict[str, Any]] = []
    with serving_stack(document, 1, Console(quiet=True)) as url, ThreadPoolExecutor(max(WARM_UP, *GROUPS)) as pool:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300)
        list(pool.map(lambda number: ask(client, "standard", number, WARM_UP_TOKENS), range(WARM_UP)))
        for group in GROUPS:
            numbers = range(1000 * seed + group, 1000 * seed + 2 * group)
            verdicts = list(pool.map(lambda number: ask(client, "tight", number, TOKENS), numbers))
            admitted = [verdict for verdict in verdicts if verdict.get("admitted")]
            point: dict[str, Any] = dict(drafts=drafts, seed=seed, asked=group, admitted=len(admitted))
            point |= dict(kept=sum(verdict["met"] for verdict in admitted))
            for name in ("predicted_tpot_ms", "tpot_ms"):
                point[name] = statistics.median(verdict[name] for verdict in admitted) if admitted else None
            points.append(point)
    return points


def table(points: list[dict[str, Any]]) -> list[str]:
    """Markdown rows: by drafts and group, summed over seeds."""
    lines = ["| drafts | at once | admitted | kept | TPOT predicted ms | TPOT ms |", "|---|---|---|---|---|---|"]
    for drafts, group in dict.fromkeys((point["drafts"], point["asked"]) for point in points):
        here = [point for point in points if (point["drafts"], point["asked"]) == (drafts, group)]
        asked, admitted, kept = (sum(point[name] for point in here) for name in ("asked", "admitted", "kept"))
        told = [
            f"{statistics.median(known):.1f}" if (known := [p[name] for p in here if p[name] is not None]) else ""
            for name in ("predicted_tpot_ms", "tpot_ms")
        ]
        lines.append(f"| {drafts} | {group} | {admitted} of {asked} | {kept} | {' | '.join(told)} |")
    return lines


def main(
    json: Annotated[Path | None, typer.Option(help="result file")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="stacks of each kind")] = 2,
) -> None:
    """Play all stacks in turns and print the table."""
    alone_s = iteration_s(load_profile(PROFILE).coefficients / SPEED, 1.0, 500.0, 0.0, 1.0, 0.0)
    tpot_ms = round(1e3 * PACE * alone_s, 2)
    points = [point for seed in range(seeds) for drafts in DRAFTS for point in play(drafts, tpot_ms, seed)]
    print(f"TPOT asked: {tpot_ms} ms; least iteration: {1e3 * alone_s:.1f} ms")
    print("\n".join(table(points)))
    if json is not None:
        with_drafts = [point for point in points if point["drafts"]]
        admitted, asked, kept = (sum(p[name] for p in with_drafts) for name in ("admitted", "asked", "kept"))
        headline = {"admitted_share": admitted / asked, "kept_share": kept / max(1, admitted)}
        config = dict(profile=PROFILE, speed=SPEED, tpot_ms=tpot_ms, drafts=list(DRAFTS), groups=list(GROUPS))
        write_result(json, "speculation_live", config=config, seeds=range(seeds), headline=headline, points=points)


if __name__ == "__main__":
    typer.run(main)
