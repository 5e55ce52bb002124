"""What a deploy with other ``args`` costs those who are served meanwhile: long streams, and requests that come.

``python -m benchmarks.redeploy [--json OUT]``. The whole stack on this machine: one ingress over two simulated engines
at a twentieth of an H100's speed. A stream of 1,200 tokens begins, and 8 s later an option of the ingress changes, so
Serve replaces it. Small requests come all the time. Once with the least time that Serve leaves the streams of a
replaced ingress, and once with the default of ``ingress.drain_s``.
"""

import copy
import threading
import time
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console

from benchmarks.local_stack import serve_document, wait_for_replicas
from benchmarks.result_file import write_result
from serving.config.fleet import IngressConfig
from serving.launch.launch import deploy, url_of
from serving.launch.local_ray import local_ray

TIERS = [{"name": "standard", "ttft_ms": 8000, "tpot_ms": 1000}, {"name": "batch", "best_effort": True}]
REPLICAS, TOKENS, BEFORE_S, PAUSE_S, PATIENCE_S = 2, 1200, 8.0, 0.5, 120.0
INGRESS = {"num_cpus": 0.2}
ARGS: dict[str, Any] = {
    "model": "embedded",
    "profile": "h100_sxm__llama-3.1-8b",
    "engine": {"kind": "simulated", "num_cpus": 0.1, "speed": 0.05},
    "fleet": {"num_replicas": REPLICAS},
}


class Stream(threading.Thread):
    """One client with a long answer."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url
        self.tokens, self.is_whole, self.seconds = 0, False, 0.0

    def run(self) -> None:
        body = {"model": "embedded", "prompt": "a", "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
        begun_s = time.monotonic()
        try:
            with httpx.stream("POST", f"{self._url}/v1/completions", json=body, timeout=PATIENCE_S) as answer:
                for line in answer.iter_lines():
                    self.tokens += line.startswith("data: {")
                    self.is_whole |= line == "data: [DONE]"
        except httpx.HTTPError:
            self.is_whole = False
        self.seconds = time.monotonic() - begun_s


def ask(url: str) -> tuple[bool, float]:
    """Whether one small request was answered, and after how many seconds."""
    begun_s = time.monotonic()
    try:
        body = {"model": "embedded", "prompt": "b", "max_tokens": 2}
        is_served = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S).status_code == 200
    except httpx.HTTPError:
        is_served = False
    return is_served, time.monotonic() - begun_s


def play(drain_s: float, console: Console) -> dict[str, Any]:
    """One stack, one deploy."""
    before = serve_document({**ARGS, "ingress": {**INGRESS, "drain_s": drain_s}}, TIERS)
    after, url = copy.deepcopy(before), url_of(before)
    after["applications"][0]["args"]["ingress"]["max_ongoing_requests"] = 999
    with local_ray(console) as address:
        deploy(address, before, console)
        wait_for_replicas(url, REPLICAS)
        usual = [ask(url)[1] for _ in range(10)]
        stream = Stream(url)
        stream.start()
        time.sleep(BEFORE_S)
        deploying = threading.Thread(target=deploy, args=(address, after, console))
        deploying.start()
        asked = []
        while stream.is_alive() or deploying.is_alive():
            asked.append(ask(url))
            time.sleep(PAUSE_S)
    return {
        "drain_s": drain_s,
        "stream_whole": stream.is_whole,
        "stream_tokens": stream.tokens,
        "stream_s": round(stream.seconds, 1),
        "asked": len(asked),
        "answered": sum(is_served for is_served, _ in asked),
        "usual_s": round(sorted(usual)[len(usual) // 2], 3),
        "longest_s": round(max(seconds for _, seconds in asked), 3),
    }


def main(json: Annotated[Path | None, typer.Option(help="write the result here")] = None) -> None:
    """Play both, print them, and write the result."""
    console = Console()
    points = [play(drain_s, console) for drain_s in (0.0, IngressConfig().drain_s)]
    for point in points:
        console.print(point)
    if json is not None:
        headline = {
            f"{name}_{point['drain_s']:g}": float(point[name])
            for point in points
            for name in ("stream_whole", "stream_s", "answered", "asked", "usual_s", "longest_s")
        }
        write_result(json, "redeploy", config={"args": ARGS, "tokens": TOKENS}, seeds=[0], headline=headline,
                     points=points)  # fmt: skip


if __name__ == "__main__":
    typer.run(main)
