"""What the way from HTTP to token costs: 16 simulated H200 replicas behind one endpoint, many streams at once.

    python -m benchmarks.e2e_overhead --json OUT

The simulated engines take little processor time, so what is measured is the stack: client, HAProxy, ingress (vLLM's
server), controller, replica actors. Hops, from the two clocks that each response carries: client less ingress is HTTP;
ingress less the model's prediction is controller, replica and the way of the tokens back.
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

from benchmarks.result_file import write_result
from serving.config.app import IMPORT_PATH
from serving.launch.launch import deploy, url_of
from serving.launch.local_ray import free_port, local_ray

ARGS = {
    "model": "embedded",
    "engine": {"kind": "simulated", "num_cpus": 0.05, "max_num_seqs": 256, "max_num_batched_tokens": 8192},
    "profile": "h200_sxm__llama-3.1-8b",
    "fleet": {"num_replicas": 16},
}
TIERS = [{"name": "standard", "ttft_ms": 5000, "tpot_ms": 200}, {"name": "batch", "best_effort": True}]
PROMPT_TOKENS, OUTPUT_TOKENS = 200, 256


def main() -> None:
    """Bring the stack up, load it at each concurrency, write and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--seconds", type=float, default=20.0, help="of load at each number of streams")
    parser.add_argument("--json", type=Path, help="result file")
    options = parser.parse_args()
    console = Console(stderr=True)
    table = {"version": 1, "default_tier": "standard", "tiers": TIERS}
    application = {"name": "polyslo", "route_prefix": "/", "import_path": IMPORT_PATH, "args": ARGS}
    document = {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": free_port()},
        "applications": [{**application, "deployments": [{"name": "Ingress", "user_config": table}]}],
    }
    with local_ray(console) as address:
        deploy(address, document, console)
        url = url_of(document)
        asyncio.run(load(url, 16, 3.0))  # warm-up
        points = [asyncio.run(load(url, streams, options.seconds)) for streams in options.streams]
        status = httpx.get(f"{url}/polyslo/status", timeout=10).json()
    headline = {
        "sim_replicas16_tokens_per_s": points[-1]["tokens_per_s"],
        "http_hop_ms_p50": points[0]["http_hop_ms_p50"],
        "controller_and_replica_hops_ms_p50": points[0]["inner_hops_ms_p50"],
        "controller_decision_ms_mean": status["controller"]["decision_us_mean"] / 1000.0,
    }
    for point in points:
        print(json.dumps(point))
    print(json.dumps(headline))
    if options.json:
        write_result(options.json, "e2e_overhead", config=ARGS, seeds=[0], headline=headline, points=points)


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
    gaps = [record["tpot_ms"] for record in records]
    return {
        "streams": streams,
        "requests": len(records),
        "tokens_per_s": len(records) * OUTPUT_TOKENS / elapsed_s,
        "ttft_ms_p50": statistics.median(record["ttft_ms"] for record in records),
        "tpot_ms_p50": statistics.median(gaps),
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
    slo = json.loads(verdict[6:])["slo"]
    return {
        "ttft_ms": (first_s - sent_s) * 1000.0,
        "tpot_ms": (time.monotonic() - first_s) * 1000.0 / (OUTPUT_TOKENS - 1),
        "ingress_ttft_ms": slo["ttft_ms"],
        "predicted_ttft_ms": slo["predicted_ttft_ms"] or slo["ttft_ms"],
        "predicted_tpot_ms": slo["predicted_tpot_ms"] or 0.0,
    }


if __name__ == "__main__":
    main()
