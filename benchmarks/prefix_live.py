"""Sessions whose prompts grow, through the whole stack: what prefix hits are worth to promises.

``python -m benchmarks.prefix_live --json OUT``. Two replicas of vLLM's engine core over timed devices, behind HTTP.
Sessions begin with a long prompt of tier ``standard``. Each later turn brings the whole conversation, and asks in turn
for a TTFT that only a cached prompt attains (``tight``) and for one that an idle replica attains without it
(``medium``). Three fleets take turns: without affinity; with it, where engines do not tell what they hold; and where
they do, so that hits count in promises. ``--kv-tokens`` plays the last one on KV caches of these sizes, which need
not hold all conversations: what a replica told is evicted, and what was promised on it must hold all the same. Fleets
that are not played keep their points in the result file.
"""

import json
import random
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import openai
import typer
from rich.console import Console

from benchmarks.local_stack import serve_document, serving_stack
from benchmarks.result_file import write_result

PROFILE, SPEED, REPLICAS = "h200_sxm__llama-3.1-8b", 0.25, 2
FIRST_TOKENS, TURN_TOKENS, OUTPUT_TOKENS = 6000, 150, 40
TURNS, THINK_S, SETTLE_S = 6, (0.5, 2.5), 1.0
TTFT_MS = {"tight": 600, "medium": 3000}
FLEETS: dict[str, dict[str, Any]] = {
    "no affinity": {"fleet": {}},
    "affinity": {"fleet": {"prefix_affinity": 1.0}, "engine_kwargs": {"kv_events_config": {"publisher": "null"}}},
    "told hits": {"fleet": {"prefix_affinity": 1.0}},
}
HEAD = "| fleet | tier | admitted | on hits | kept | prompt cached | TTFT predicted ms | TTFT ms |"
ROW = "| {fleet} | {tier} | {admitted} of {asked} | {on_hits} | {kept} | {cached} | {predicted} | {ttft} |"


def args(fleet: dict[str, Any]) -> dict[str, Any]:
    """The application with this fleet."""
    engine = {"kind": "vllm", "device": "timed", "num_cpus": 0.4, "speed": SPEED}
    engine |= {"kv_capacity_tokens": fleet.get("kv_capacity_tokens", 0)}
    engine |= {"engine_kwargs": fleet.get("engine_kwargs", {})}
    model = {"max_model_len": 16_384, "server_kwargs": {"enable_prompt_tokens_details": True}}
    own = {"num_replicas": REPLICAS, **fleet["fleet"]}
    return {"profile": PROFILE, "model": model, "engine": engine, "fleet": own}


def overflowing(kv_tokens: list[int]) -> dict[str, dict[str, Any]]:
    """Fleets with told hits whose replicas have so many KV tokens each, by name."""
    return {
        f"told hits, {tokens / 1000:g}k": FLEETS["told hits"] | {"kv_capacity_tokens": tokens} for tokens in kv_tokens
    }


def tiers() -> list[dict[str, Any]]:
    """Those of the turns, one for what begins sessions, and best effort."""
    named = [
        {"name": name, "ttft_ms": ttft_ms, "tpot_ms": 200, "unattainable": "refuse"}
        for name, ttft_ms in TTFT_MS.items()
    ]
    return [*named, {"name": "standard", "ttft_ms": 60_000, "tpot_ms": 500}, {"name": "batch", "best_effort": True}]


def ask(client: openai.OpenAI, tier: str, prompt: list[int]) -> tuple[dict[str, Any], list[int]]:
    """The verdict on one turn with the part of its prompt that was cached, empty where it is refused; tokens made."""
    try:
        answer = client.completions.create(
            model="embedded",
            prompt=prompt,
            max_tokens=OUTPUT_TOKENS,
            temperature=0,
            extra_body={"ignore_eos": True, "return_token_ids": True},
            extra_headers={"x-slo-tier": tier},
        )
    except openai.RateLimitError:
        return {}, []
    told = answer.choices[0].model_extra or {}
    details = answer.usage.prompt_tokens_details if answer.usage else None
    cached = (details.cached_tokens or 0) / len(prompt) if details else None
    return dict((answer.model_extra or {})["slo"]) | {"cached": cached}, list(told.get("token_ids") or ())


def converse(client: openai.OpenAI, number: int, seed: int) -> list[dict[str, Any]]:
    """One session in closed loop: a point per turn after the first. A refused turn is given up."""
    choose, points = random.Random(1000 * seed + number), list[dict[str, Any]]()
    prompt = [choose.randrange(32, 127) for _ in range(FIRST_TOKENS)]
    time.sleep(choose.uniform(0.0, THINK_S[1]))
    _, made = ask(client, "standard", prompt)
    time.sleep(SETTLE_S)
    for turn in range(TURNS):
        time.sleep(choose.uniform(*THINK_S))
        prompt = prompt + made + [choose.randrange(32, 127) for _ in range(TURN_TOKENS)]
        tier = [*TTFT_MS][(turn + number) % len(TTFT_MS)]
        verdict, made = ask(client, tier, prompt)
        is_admitted = bool(verdict.get("admitted"))
        point: dict[str, Any] = {"tier": tier, "session": number, "turn": turn, "admitted": is_admitted}
        point |= {"kept": is_admitted and bool(verdict["met"])}
        for name in ("predicted_ttft_ms", "ttft_ms", "cached"):
            point[name] = verdict.get(name) if is_admitted else None
        points.append(point)
    return points


def play(name: str, fleet: dict[str, Any], sessions: int, seed: int) -> list[dict[str, Any]]:
    """One stack under all sessions at once."""
    document = serve_document(args(fleet), tiers())
    with serving_stack(document, REPLICAS, Console(quiet=True)) as url, ThreadPoolExecutor(sessions) as pool:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300)
        played = list(pool.map(lambda number: converse(client, number, seed), range(sessions)))
    return [{"fleet": name, "seed": seed, **point} for points in played for point in points]


def told(points: list[dict[str, Any]], name: str, form: str) -> str:
    """The median of what is known of it."""
    known = [point[name] for point in points if point.get(name) is not None]
    return form.format(statistics.median(known)) if known else ""


def is_on_hit(point: dict[str, Any]) -> bool:
    """Whether a promise counts a prefix hit: without one even an idle replica needs longer than ``tight`` allows."""
    return bool(point["admitted"]) and point["predicted_ttft_ms"] < TTFT_MS["tight"]


def fleets_of(points: list[dict[str, Any]]) -> list[str]:
    """Those that were played."""
    return list(dict.fromkeys(point["fleet"] for point in points))


def table(points: list[dict[str, Any]]) -> list[str]:
    """Markdown rows: by fleet and tier, over all seeds."""
    lines = [HEAD, "|---" * 8 + "|"]
    for fleet in fleets_of(points):
        for tier in TTFT_MS:
            here = [point for point in points if (point["fleet"], point["tier"]) == (fleet, tier)]
            admitted, kept = (sum(point[name] for point in here) for name in ("admitted", "kept"))
            seen = dict(predicted=told(here, "predicted_ttft_ms", "{:.0f}"), ttft=told(here, "ttft_ms", "{:.0f}"))
            seen |= dict(on_hits=str(sum(map(is_on_hit, here))), cached=told(here, "cached", "{:.2f}"))
            lines.append(ROW.format(fleet=fleet, tier=tier, admitted=admitted, asked=len(here), kept=kept, **seen))
    return lines


def headline(points: list[dict[str, Any]]) -> dict[str, float]:
    """Attained of all turns, by fleet, the share of promises that were kept, and the same of those on hits."""
    figures: dict[str, float] = {}
    for fleet in fleets_of(points):
        here = [point for point in points if point["fleet"] == fleet]
        admitted, kept = (sum(point[name] for point in here) for name in ("admitted", "kept"))
        name = fleet.replace(",", "").replace(" ", "_")
        figures |= {f"attained_{name}": kept / max(1, len(here)), f"kept_{name}": kept / max(1, admitted)}
        if on_hits := [point["kept"] for point in here if is_on_hit(point)]:
            figures |= {f"on_hits_{name}": float(len(on_hits)), f"kept_on_hits_{name}": statistics.fmean(on_hits)}
    return figures


def with_others(path: Path, points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """``points``, and those in the file ``path`` of fleets that are not among them."""
    known = json.loads(path.read_text(encoding="utf-8"))["points"] if path.exists() else []
    played = set(fleets_of(points))
    return [point for point in known if point["fleet"] not in played] + points


def main(
    result: Annotated[Path | None, typer.Option("--json", help="result file")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="stacks of each kind")] = 2,
    sessions: Annotated[int, typer.Option(min=1, help="at a time")] = 12,
    kv_tokens: Annotated[list[int] | None, typer.Option(help="told hits only, on KV caches of this size")] = None,
) -> None:
    """Play all stacks in turns and print the table."""
    fleets = overflowing(kv_tokens) if kv_tokens else FLEETS
    runs = [play(*fleet, sessions, seed) for seed in range(seeds) for fleet in fleets.items()]
    points = [point for run in runs for point in run]
    if result is not None:
        points = with_others(result, points)
    print("\n".join(table(points)))
    figures = headline(points)
    print(figures)
    if result is not None:
        config = dict(profile=PROFILE, speed=SPEED, replicas=REPLICAS, sessions=sessions, ttft_ms=TTFT_MS)
        config |= dict(first_tokens=FIRST_TOKENS, turn_tokens=TURN_TOKENS, output_tokens=OUTPUT_TOKENS, turns=TURNS)
        write_result(result, "prefix_live", config=config, seeds=range(seeds), headline=figures, points=points)


if __name__ == "__main__":
    typer.run(main)
