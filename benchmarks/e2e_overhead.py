"""What the way from HTTP to token costs: 16 simulated H200 replicas behind one endpoint, many streams at once.

    python -m benchmarks.e2e_overhead [--quick] [--json OUT]

The simulated engines take little processor time, so what is measured is the stack: client, HAProxy, ingress (vLLM's
server), controller, replica actors. Hops, from the two clocks that each response carries: client less ingress is HTTP;
ingress less the model's prediction is controller, replica and the way of the tokens back. vLLM's own server over
engines that only keep the time of the same profile (``benchmarks.front_alone``) gets the same load in turns: what the
stack adds to its TTFT, and tokens over its tokens. Nothing is pinned to cores here; ``benchmarks.front_path`` does.
"""

import argparse
import asyncio
import json
import statistics
import time
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import numpy as np
from rich.console import Console

from benchmarks.front_path import local_server
from benchmarks.local_stack import serve_document, serving_stack
from benchmarks.result_file import write_result

PROFILE, REPLICAS = "h200_sxm__llama-3.1-8b", 16
ARGS = {
    "model": "embedded",
    "engine": {"kind": "simulated", "num_cpus": 0.05, "max_num_seqs": 256, "max_num_batched_tokens": 8192},
    "profile": PROFILE,
    "fleet": {"num_replicas": REPLICAS},
}
TIERS = [{"name": "standard", "ttft_ms": 5000, "tpot_ms": 200}, {"name": "batch", "best_effort": True}]
PROMPT_TOKENS, OUTPUT_TOKENS = 200, 256
SERVER, STACK = "server", "stack"


def main() -> None:
    """Bring both up, load them in turns at each concurrency, write and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--seconds", type=float, default=20.0, help="of load at each number of streams")
    parser.add_argument("--rounds", type=int, default=1, help="turns of server and stack")
    parser.add_argument("--quick", action="store_true", help="4 s at 1 and 64 streams")
    parser.add_argument("--json", type=Path, help="result file")
    options = parser.parse_args()
    if options.quick:
        options.streams, options.seconds, options.rounds = [1, 64], 4.0, 1
    points: list[dict[str, Any]] = []
    document = serve_document(ARGS, TIERS)
    with local_server(REPLICAS) as port, serving_stack(document, REPLICAS, Console(stderr=True)) as url:
        urls = {SERVER: f"http://127.0.0.1:{port}", STACK: url}
        for side in urls.values():
            asyncio.run(load(side, 16, 3.0))  # warm-up
        for turn in range(options.rounds):
            for streams in options.streams:
                for side, address in urls.items():
                    figures = asyncio.run(load(address, streams, options.seconds))
                    points.append({"side": side, "round": turn, **figures})
                    print(json.dumps(points[-1]), flush=True)
        status = httpx.get(f"{url}/polyslo/status", timeout=10).json()
    figures = headline(points) | {"controller_decision_ms_mean": status["controller"]["decision_us_mean"] / 1000.0}
    print(json.dumps(figures))
    if options.json:
        config = {**ARGS, "seconds": options.seconds, "rounds": options.rounds}
        write_result(options.json, "e2e_overhead", config=config, seeds=[0], headline=figures, points=points)


def headline(points: list[dict[str, Any]]) -> dict[str, float]:
    """Medians over the rounds: what the stack adds to the server's TTFT at the fewest streams, tokens over the
    server's at 64, the stack's tokens at the most streams, and its hops at the fewest."""
    streams = sorted({point["streams"] for point in points})
    few, many = streams[0], streams[-1]
    found = {
        "added_ttft_ms_p50": median(points, STACK, few, "ttft_ms_p50") - median(points, SERVER, few, "ttft_ms_p50"),
        "sim_replicas16_tokens_per_s": median(points, STACK, many, "tokens_per_s"),
        "http_hop_ms_p50": median(points, STACK, few, "http_hop_ms_p50"),
        "controller_and_replica_hops_ms_p50": median(points, STACK, few, "inner_hops_ms_p50"),
    }
    if 64 in streams:
        tokens = [median(points, side, 64, "tokens_per_s") for side in (STACK, SERVER)]
        found["tokens_per_s_ratio_64"] = tokens[0] / tokens[1]
    return found


def median(points: list[dict[str, Any]], side: str, streams: int, what: str) -> float:
    """Over the rounds."""
    return statistics.median(p[what] for p in points if (p["side"], p["streams"]) == (side, streams))


async def load(url: str, streams: int, seconds: float) -> dict[str, Any]:
    """``streams`` clients in a closed loop for ``seconds``."""
    rng, stop_s = np.random.default_rng(0), time.monotonic() + seconds
    records: list[dict[str, float]] = []
    connector = aiohttp.TCPConnector(limit=0)
    started_s = time.monotonic()
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=120)) as session:

        async def client() -> None:
            while time.monotonic() < stop_s:
                records.append(await stream(session, url, rng.integers(10, 200, PROMPT_TOKENS).tolist()))

        await asyncio.gather(*(client() for _ in range(streams)))
    elapsed_s = time.monotonic() - started_s
    told = {
        "streams": streams,
        "requests": len(records),
        "tokens_per_s": len(records) * OUTPUT_TOKENS / elapsed_s,
        "ttft_ms_p50": statistics.median(record["ttft_ms"] for record in records),
        "tpot_ms_p50": statistics.median(record["tpot_ms"] for record in records),
    }
    if "ingress_ttft_ms" not in records[0]:
        return told
    return told | {
        "predicted_tpot_ms_p50": statistics.median(record["predicted_tpot_ms"] for record in records),
        "http_hop_ms_p50": statistics.median(record["ttft_ms"] - record["ingress_ttft_ms"] for record in records),
        "inner_hops_ms_p50": statistics.median(
            record["ingress_ttft_ms"] - record["predicted_ttft_ms"] for record in records
        ),
    }


async def stream(session: aiohttp.ClientSession, url: str, prompt: list[int]) -> dict[str, float]:
    """One streamed completion; what the client saw and what the server said of it, in milliseconds."""
    body = {"model": "embedded", "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "stream": True}
    sent_s, first_s, verdict = time.monotonic(), 0.0, b""
    async with session.post(f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if line.startswith(b"data: {"):
                first_s = first_s or time.monotonic()
                verdict = line if b'"slo":' in line else verdict
    seen = {
        "ttft_ms": (first_s - sent_s) * 1000.0,
        "tpot_ms": (time.monotonic() - first_s) * 1000.0 / (OUTPUT_TOKENS - 1),
    }
    if not verdict:  # a server that makes no promises
        return seen
    slo = json.loads(verdict[6:])["slo"]
    return seen | {
        "ingress_ttft_ms": slo["ttft_ms"],
        "predicted_ttft_ms": slo["predicted_ttft_ms"] or slo["ttft_ms"],
        "predicted_tpot_ms": slo["predicted_tpot_ms"] or 0.0,
    }


if __name__ == "__main__":
    main()
