"""``profile: auto`` on a model that no shipped profile knows: how soon it is ready, and how well it predicts.

    python -m benchmarks.auto_profile [--requests N] [--json OUT]

A copy of the embedded model under another path is unknown, so its first start measures it, with an empty cache. Half of
the requests come, then the other half; after each the replica says how wrong its corrected model is, and the requests
of that half how wrong the told TPOT was. Then the stack starts once more.
"""

import argparse
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from rich.console import Console

from benchmarks.local_stack import serve_document, serving_stack
from benchmarks.result_file import write_result
from replicas.embedded import ensure_embedded_model
from serving.launch.kernels import compile_kernels
from serving.loadgen.mix import SloClass
from serving.loadgen.replay import ReplayOptions, replay
from serving.loadgen.trace import Trace

TIERS = [{"name": "standard", "ttft_ms": 5000, "tpot_ms": 300}, {"name": "batch", "best_effort": True}]
PROMPT_TOKENS, OUTPUT_TOKENS = (20, 400), (20, 100)


def main() -> None:
    """Two starts and the requests between them; write and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--rate", type=float, default=4.0, help="requests per second")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="result file")
    options = parser.parse_args()
    console = Console(stderr=True)
    compile_kernels(console)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "unknown"
        shutil.copytree(ensure_embedded_model(), model)
        os.environ["POLYSLO_CACHE"] = str(Path(folder) / "cache")
        points = [start(str(model), options.requests if turn == 0 else 0, options, console) for turn in range(2)]
    headline = {name: value for name, value in points[0].items() if isinstance(value, float)}
    headline["ready_s_again"], headline["measured_again"] = points[1]["ready_s"], float(points[1]["profiles_written"])
    print(headline)
    if options.json:
        config = {"requests": options.requests, "rate_per_s": options.rate, "tiers": TIERS}
        write_result(
            options.json, "auto_profile", config=config, seeds=[options.seed], headline=headline, points=points
        )


def start(model: str, requests: int, options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """One stack: seconds until its replica is ready, and what it predicts under load."""
    known, begun_s = profiles(), time.monotonic()
    document = serve_document({"model": model, "fleet": {"num_replicas": 1}}, TIERS)
    with serving_stack(document, 1, console) as url:
        found: dict[str, Any] = {"ready_s": time.monotonic() - begun_s}
        found["profiles_written"] = len(set(profiles().items()) - set(known.items()))
        for half in range(2 if requests else 0):
            trace = poisson(requests // 2, options.rate, options.seed + half)
            played = replay(ReplayOptions(trace, url=url, slo_mix=(SloClass("standard", 1.0, "standard"),)), console)
            told = httpx.get(f"{url}/polyslo/status", timeout=10).json()["replicas"][0]["drift"]
            errors = played.points[0]["prediction"]
            figures = {
                "iteration_error": told["error"],
                "iteration_error_uncorrected": told["uncorrected_error"],
                "slope": told["slope"],
                "tpot_error": errors["tpot"]["mape_pct"] / 100.0,
                "ttft_error_ms_p50": errors["ttft"]["abs_p50_ms"],
            }
            found |= {f"{name}_half_{half + 1}": value for name, value in figures.items()}
            console.print(half, found)
    return found


def profiles() -> dict[str, int]:
    """Measured profiles in the cache, and when each was written."""
    folder = Path(os.environ["POLYSLO_CACHE"]) / "profiles"
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("*.json")}


def poisson(requests: int, rate_per_s: float, seed: int) -> Trace:
    """Requests of uniform lengths."""
    rng = np.random.default_rng(seed)
    prompts, outputs = (rng.integers(*each, size=requests) for each in (PROMPT_TOKENS, OUTPUT_TOKENS))
    arrivals_s = np.cumsum(rng.exponential(1.0 / rate_per_s, requests))
    return Trace("poisson", arrivals_s, prompts, outputs, ["standard"] * requests)


if __name__ == "__main__":
    main()
