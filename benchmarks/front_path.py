"""What the way of a token costs: vLLM's own server and the whole stack, in turns, on the same cores.

    python -m benchmarks.front_path [--quick] [--json OUT]

*Server*: vLLM's OpenAI server over engines in its process that only keep the time of the same profile. *Stack*:
HAProxy, ingresses, controller, simulated replicas. Both get the same requests in a closed loop. The server side
(server; or proxy, ingress, controller) is pinned to core 0, the client and the simulated replicas to core 1. Processor
seconds are those of all threads of a kind of process within the measured window.
"""

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
from rich.console import Console

from benchmarks.front_load import BEGIN, END, OUTPUT_TOKENS, PROMPT_TOKENS
from benchmarks.local_stack import serve_document, serving_stack
from benchmarks.result_file import write_result
from serving.launch.local_ray import free_port, with_project

ENGINE: dict[str, Any] = {"kind": "simulated", "num_cpus": 0.01, "max_num_seqs": 256, "max_num_batched_tokens": 8192}
PROFILE = "h200_sxm__llama-3.1-8b"
TIERS: list[dict[str, Any]] = [
    {"name": "standard", "ttft_ms": 20000, "tpot_ms": 500},
    {"name": "batch", "best_effort": True},
]
SERVER_CORE, CLIENT_CORE = 0, 1
# Kinds of processes by a part of their name, and the core that each is pinned to.
KINDS = {
    "ingress": (":Ingress", SERVER_CORE),
    "proxy": ("haproxy", SERVER_CORE),
    "replicas": (":Replica", CLIENT_CORE),
    "controller": ("ray::Controller", SERVER_CORE),
    "serve": ("ServeController", SERVER_CORE),
    "node": ("raylet", SERVER_CORE),
    "heads": ("gcs_server", SERVER_CORE),
    "server": ("benchmarks.front_alone", SERVER_CORE),
    "client": ("benchmarks.front_load", CLIENT_CORE),
}
START_S = 120.0


def main() -> None:
    """Measure each fleet size against the server, then write and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 16])
    parser.add_argument(
        "--ingresses", type=int, nargs="+", default=[1], help="of the stack; all but the first with the smallest fleet"
    )
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measured window")
    parser.add_argument("--rounds", type=int, default=3, help="turns of server and stack")
    parser.add_argument(
        "--quick", action="store_true", help="one round of short windows; larger fleets at most streams"
    )
    parser.add_argument("--json", type=Path, help="result file")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.seconds = 1, 4.0
    points: list[dict[str, Any]] = []
    for replicas, ingresses in fleets_of(options):
        with local_server(replicas) as server_port, local_stack(replicas, ingresses) as stack_port:
            for turn, streams in itertools.product(range(options.rounds), streams_of(options, replicas)):
                for side, port in (("server", server_port), ("stack", stack_port)):
                    known = {"side": side, "replicas": replicas, "ingresses": ingresses, "streams": streams}
                    point = known | {"round": turn} | measured(port, streams, options.seconds)
                    print(json.dumps(point), flush=True)
                    points.append(point)
    headline = headline_of(points)
    print(json.dumps(headline))
    if options.json:
        config = {
            "engine": ENGINE,
            "profile": PROFILE,
            "prompt_tokens": PROMPT_TOKENS,
            "output_tokens": OUTPUT_TOKENS,
            "seconds": options.seconds,
            "rounds": options.rounds,
        }
        write_result(options.json, "front_path", config=config, seeds=[0], headline=headline, points=points)


def fleets_of(options: argparse.Namespace) -> list[tuple[int, int]]:
    """(replicas, ingresses) of every stack that is measured."""
    first, *more = options.ingresses
    return [(replicas, first) for replicas in options.replicas] + [(min(options.replicas), count) for count in more]


def streams_of(options: argparse.Namespace, replicas: int) -> list[int]:
    """Numbers of streams that a fleet of this size gets: a quick run loads only the smallest with all of them."""
    is_partial = options.quick and replicas > min(options.replicas)
    return [max(options.streams)] if is_partial else list(options.streams)


@contextlib.contextmanager
def local_server(engines: int) -> Iterator[int]:
    """vLLM's server in a process of its own, as if it had ``engines`` engines; yields its port."""
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.front_alone", str(port), PROFILE, str(engines)]
    with subprocess.Popen(command, env=with_project(os.environ)) as process:
        try:
            _until(lambda: httpx.get(f"http://127.0.0.1:{port}/version").status_code == 200, process)
            yield port
        finally:
            process.terminate()


def _until(is_up: Callable[[], bool], process: "subprocess.Popen[bytes]") -> None:
    give_up_s = time.monotonic() + START_S
    while time.monotonic() < give_up_s and process.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            if is_up():
                return
        time.sleep(0.2)
    raise RuntimeError("the server did not start")


@contextlib.contextmanager
def local_stack(replicas: int, ingresses: int = 1) -> Iterator[int]:
    """The whole stack over simulated replicas, all in one process; yields its HTTP port."""
    engine = ENGINE | {"per_process": replicas}
    args = {"model": "embedded", "engine": engine, "profile": PROFILE, "fleet": {"num_replicas": replicas}}
    args["ingress"] = {"num_replicas": ingresses, "num_cpus": 0.2}
    document = serve_document(args, TIERS)
    with serving_stack(document, replicas, Console(stderr=True)):
        yield int(document["http_options"]["port"])


def measured(port: int, streams: int, seconds: float) -> dict[str, Any]:
    """The client's figures of one window, and the processor time of each kind of process in it."""
    warm_s = 2.0 if streams < 256 else 4.0
    words = ["127.0.0.1", str(port), str(streams), str(warm_s), str(seconds)]
    command = [sys.executable, "-m", "benchmarks.front_load", *words]
    with subprocess.Popen(command, env=with_project(os.environ), stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        pin(processes())
        _read_line(client.stdout, BEGIN)
        before = cpu_seconds(processes())
        _read_line(client.stdout, END)
        after = cpu_seconds(processes())
        figures = json.loads(client.stdout.readline())
    spent = {kind: after[kind] - before.get(kind, 0.0) for kind in after}
    tokens = max(figures["tokens"], 1.0)
    return figures | {
        "cpu_s": {kind: round(value, 2) for kind, value in spent.items()},
        "cpu_us_per_token": {kind: round(value / tokens * 1e6, 1) for kind, value in spent.items()},
    }


def _read_line(stdout: Any, wanted: str) -> None:
    line = stdout.readline()
    if line.strip() != wanted:
        raise RuntimeError(f"the client ended early: {line!r}")


def processes() -> list[tuple[str, psutil.Process]]:
    """All processes below this one that are of a known kind."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            name = " ".join(process.cmdline())
            kind = next((kind for kind, (part, _) in KINDS.items() if part in name), "")
            found += [(kind, process)] if kind else []
    return found


def pin(found: list[tuple[str, psutil.Process]]) -> None:
    """Bind every thread of them to the core of its side; a machine with one core has only one side."""
    if (os.cpu_count() or 1) < 2:
        return
    for kind, process in found:
        for thread in Path(f"/proc/{process.pid}/task").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                os.sched_setaffinity(int(thread.name), {KINDS[kind][1]})


def cpu_seconds(found: list[tuple[str, psutil.Process]]) -> dict[str, float]:
    """Processor seconds so far, user and system, by kind."""
    spent: dict[str, float] = {}
    for kind, process in found:
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            spent[kind] = spent.get(kind, 0.0) + times.user + times.system
    return spent


def waited_seconds(found: list[tuple[str, psutil.Process]]) -> dict[str, float]:
    """Seconds so far in which a thread could run and had no core, by kind; empty where the system does not tell."""
    waited: dict[str, float] = {}
    for kind, process in found:
        for thread in Path(f"/proc/{process.pid}/task").glob("[0-9]*/schedstat"):
            with contextlib.suppress(OSError):
                waited[kind] = waited.get(kind, 0.0) + int(thread.read_text().split()[1]) / 1e9
    return waited


def headline_of(points: list[dict[str, Any]]) -> dict[str, float]:
    """Medians over the rounds, stack against server of the same turn; of one ingress where nothing else is said."""
    fewest = min(p.get("ingresses", 1) for p in points)
    several = [p for p in points if p.get("ingresses", 1) > fewest]
    points = [p for p in points if p.get("ingresses", 1) == fewest]
    few, *more = sorted({p["replicas"] for p in points})
    streams = sorted({p["streams"] for p in points})
    busy = streams[-1]

    def ratio(of: Callable[[dict[str, Any], dict[str, Any]], float], replicas: int, at: int) -> float:
        return statistics.median(of(stack, server) for stack, server in pairs(points, replicas, at))

    def cpu_ratio(*kinds: str) -> float:
        return ratio(
            lambda stack, server: (
                sum(stack["cpu_us_per_token"][kind] for kind in kinds) / server["cpu_us_per_token"]["server"]
            ),
            few,
            busy,
        )

    headline = {
        "cpu_per_token_ratio_ingress": cpu_ratio("ingress"),
        "cpu_per_token_ratio_stack": cpu_ratio("ingress", "proxy", "controller"),
        "tokens_per_s_ratio_saturated": ratio(lambda a, b: a["tokens_per_s"] / b["tokens_per_s"], few, busy),
    }
    for at in (1, 64):
        if at in streams:
            headline[f"added_ttft_ms_p50_{at}"] = ratio(lambda a, b: a["ttft_ms_p50"] - b["ttft_ms_p50"], few, at)
    for many in more:
        name = f"tokens_per_s_{many}_over_{few}_replicas"
        headline[name] = median_rate(points, many, busy) / median_rate(points, few, busy)
    for count in sorted({p["ingresses"] for p in several}):
        own = [p for p in several if p["ingresses"] == count]
        name = f"tokens_per_s_{count}_over_{fewest}_ingresses"
        headline[name] = median_rate(own, few, busy) / median_rate(points, few, busy)
    return headline


def pairs(points: list[dict[str, Any]], replicas: int, streams: int) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Stack and server of the same turn."""
    sides: dict[str, dict[int, dict[str, Any]]] = {"stack": {}, "server": {}}
    for point in points:
        if (point["replicas"], point["streams"]) == (replicas, streams):
            sides[point["side"]][point["round"]] = point
    return [(sides["stack"][turn], sides["server"][turn]) for turn in sides["stack"]]


def median_rate(points: list[dict[str, Any]], replicas: int, streams: int) -> float:
    """Tokens per second of the stack."""
    return statistics.median(stack["tokens_per_s"] for stack, _ in pairs(points, replicas, streams))


if __name__ == "__main__":
    main()
