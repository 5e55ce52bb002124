"""Seconds from nothing to the first token on this machine, by when planning kernels are compiled.

    python -m benchmarks.first_start [--turns N] --json OUT

Each start is a process of its own: a local Ray, `examples/serve.yaml` as `make demo` deploys it, one streamed request.
`before` compiles every kernel and then deploys, with an empty cache. `beside` deploys at once, with an empty cache:
controller and engines wait for kernels where they need them, as `polyslo serve` does. `cached` finds all of them.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

WAYS = ("before", "beside", "cached")
CACHE = "NUMBA_CACHE_DIR"


def main() -> None:
    """Take turns, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=2, help="starts of each way")
    parser.add_argument("--json", type=Path, help="result file")
    parser.add_argument("--one", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(start(options.one)))
        return
    from benchmarks.result_file import write_result

    points: list[dict[str, Any]] = []
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as full:
        _child("before", full)  # fills it; not counted
        for turn in range(options.turns):
            for way in WAYS if turn % 2 == 0 else WAYS[::-1]:
                with tempfile.TemporaryDirectory() as empty:
                    found = _child(way, full if way == "cached" else empty)
                    points.append({"way": way, "turn": turn, **found})
                    seconds[way].append(found["seconds"])
                print(points[-1], flush=True)
    medians = {way: statistics.median(each) for way, each in seconds.items()}
    figures = {f"first_token_s_{way}": each for way, each in medians.items()}
    figures["beside_over_before"] = medians["beside"] / medians["before"]
    print(figures)
    if options.json:
        config, seeds = {"turns": options.turns}, range(options.turns)
        write_result(options.json, "first_start", config=config, seeds=seeds, headline=figures, points=points)


def _child(way: str, cache: str) -> dict[str, float]:
    """One start in a process of its own with the cache of kernels in ``cache``."""
    command = [sys.executable, "-m", "benchmarks.first_start", "--one", way]
    done = subprocess.run(command, env={**os.environ, CACHE: cache}, stdout=subprocess.PIPE, text=True, check=True)
    told: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return told


def start(way: str) -> dict[str, float]:
    """Bring everything up; seconds until the compiler was waited for, the application was up, the first token came."""
    began_s = time.monotonic()
    from rich.console import Console

    from serving.launch.kernels import compiling
    from serving.launch.launch import deploy, read_document, url_of
    from serving.launch.local_ray import free_port, local_ray
    from serving.launch.starter import STARTER

    console = Console(stderr=True)
    document = read_document(STARTER / "serve.yaml", free_port())
    with compiling() as compilation, local_ray(console) as address:
        if way == "before":
            compilation.wait(console)
        compiled_s = time.monotonic() - began_s
        deploy(address, document, console, compilation=compilation)
        up_s = time.monotonic() - began_s
        _first_token(url_of(document))
        return {"seconds": time.monotonic() - began_s, "up_s": up_s, "deployed_s": compiled_s}


def _first_token(url: str) -> None:
    asked = {"model": "embedded", "prompt": "Hello", "max_tokens": 4, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=asked, timeout=120.0) as answer:
        if answer.status_code != 200:
            raise SystemExit(f"first request: {answer.status_code} {answer.read().decode()}")
        next(answer.iter_lines())


if __name__ == "__main__":
    main()
