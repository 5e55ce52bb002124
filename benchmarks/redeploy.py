"""What a deploy with other ``args`` costs those who are served meanwhile: long streams, and requests that come.

``python -m benchmarks.redeploy [--json OUT]``. The whole stack on this machine: one ingress over two simulated engines
at a twentieth of an H100's speed. A stream of 1,200 tokens begins, and 8 s later an option of the ingress changes, so
Serve replaces it. Small requests come all the time. Once with the least time that Serve leaves the streams of a
replaced ingress, once with the default of ``ingress.drain_s``, and once with that and other code, so that the
controller is replaced as well.
"""

import copy
import threading
import time
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import httpx
import typer
from rich.console import Console

from benchmarks.local_stack import change_code, copied_code, serve_document, wait_for_replicas
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


class Asked(NamedTuple):
    """What became of one small request."""

    is_served: bool
    is_promised: bool
    seconds: float


def ask(url: str) -> Asked:
    """One small request with the default tier's objective."""
    begun_s, is_served, is_promised = time.monotonic(), False, False
    try:
        body = {"model": "embedded", "prompt": "b", "max_tokens": 2}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S)
        is_served = answer.status_code == 200
        is_promised = is_served and answer.json()["slo"]["admitted"]
    except httpx.HTTPError:
        is_served = False
    return Asked(is_served, is_promised, time.monotonic() - begun_s)


def code_of(url: str) -> str:
    """The controller's, as its status tells it."""
    return str(httpx.get(f"{url}/polyslo/status", timeout=PATIENCE_S).json()["controller"]["code"])


def play(drain_s: float, has_other_code: bool, console: Console) -> dict[str, Any]:
    """One stack, one deploy."""
    before = serve_document({**ARGS, "ingress": {**INGRESS, "drain_s": drain_s}}, TIERS)
    after, url = copy.deepcopy(before), url_of(before)
    after["applications"][0]["args"]["ingress"]["max_ongoing_requests"] = 999
    with copied_code() as code, local_ray(console) as address:
        deploy(address, before, console)
        wait_for_replicas(url, REPLICAS)
        usual, old_code = [ask(url).seconds for _ in range(10)], code_of(url)
        stream = Stream(url)
        stream.start()
        time.sleep(BEFORE_S)
        if has_other_code:
            change_code(code)
        deploying = threading.Thread(target=deploy, args=(address, after, console))
        deploying.start()
        asked = []
        while stream.is_alive() or deploying.is_alive():
            asked.append(ask(url))
            time.sleep(PAUSE_S)
        is_replaced = code_of(url) != old_code
    return {
        "drain_s": drain_s,
        "other_code": has_other_code,
        "controller_replaced": is_replaced,
        "stream_whole": stream.is_whole,
        "stream_tokens": stream.tokens,
        "stream_s": round(stream.seconds, 1),
        "asked": len(asked),
        "answered": sum(each.is_served for each in asked),
        "promised": sum(each.is_promised for each in asked),
        "usual_s": round(sorted(usual)[len(usual) // 2], 3),
        "longest_s": round(max(each.seconds for each in asked), 3),
    }


def main(json: Annotated[Path | None, typer.Option(help="write the result here")] = None) -> None:
    """Play both, print them, and write the result."""
    console = Console()
    drain_s = IngressConfig().drain_s
    points = [play(*each, console) for each in ((0.0, False), (drain_s, False), (drain_s, True))]
    for point in points:
        console.print(point)
    if json is not None:
        headline = {
            f"{name}_{point['drain_s']:g}{'_other_code' if point['other_code'] else ''}": float(point[name])
            for point in points
            for name in ("stream_whole", "stream_s", "answered", "promised", "asked", "usual_s", "longest_s")
        }
        write_result(json, "redeploy", config={"args": ARGS, "tokens": TOKENS}, seeds=[0], headline=headline,
                     points=points)  # fmt: skip


if __name__ == "__main__":
    typer.run(main)
