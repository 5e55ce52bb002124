"""What a simulated replica costs: processor time per token and memory with one replica per process, and with many.

    python -m benchmarks.simulated_cost [--quick] [--json OUT]

Replicas as a process of Serve's hosts them (``replicas.hosted``), with their reports, sweeps and encoded messages, but
without Ray and sockets: what those cost comes on top, once per process. Both ways run in turns under the same streams,
idle first. Only processor seconds are compared, so that other work on the machine changes little.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil

from benchmarks.result_file import write_result
from protocol.messages import Slo, Submission
from protocol.names import replica_name
from replicas.channels import encode_outputs
from replicas.config import ReplicaConfig
from replicas.hosted import HostedReplica
from replicas.reporter import Reporter
from serving.launch.local_ray import with_project

PROFILE, SPEED, OUTPUT_TOKENS, PROMPT_TOKENS = "h200_sxm__llama-3.1-8b", 0.3, 3500, 200
WARM_S, IDLE_S = 2.0, 4.0


def main() -> None:
    """Measure each way in turns, then write and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=16)
    parser.add_argument("--streams", type=int, default=4, help="of each replica")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measured window")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round of short windows")
    parser.add_argument("--json", type=Path, help="result file")
    parser.add_argument("--host", type=int, help="be a process that hosts so many; what this program starts")
    options = parser.parse_args()
    if options.host:
        print(json.dumps(asyncio.run(host(options.host, options.streams, options.seconds))))
        return
    if options.quick:
        options.rounds, options.seconds = 1, 4.0
    points: list[dict[str, Any]] = []
    for turn in range(options.rounds):
        for per_process in (1, options.replicas):
            points.append({"per_process": per_process, "round": turn, **measure(per_process, options)})
            print(json.dumps(points[-1]), flush=True)
    headline = headline_of(points)
    print(json.dumps(headline))
    if options.json:
        config = {"profile": PROFILE, "speed": SPEED, "replicas": options.replicas, "streams": options.streams}
        write_result(options.json, "simulated_cost", config=config, seeds=[0], headline=headline, points=points)


def measure(per_process: int, options: argparse.Namespace) -> dict[str, Any]:
    """All replicas at a time, so many in each process."""
    words = ["--host", str(per_process), "--streams", str(options.streams), "--seconds", str(options.seconds)]
    command = [sys.executable, "-m", "benchmarks.simulated_cost", *words]
    hosts = [
        subprocess.Popen(command, env=with_project(os.environ), stdout=subprocess.PIPE, text=True)
        for _ in range(options.replicas // per_process)
    ]
    told = [json.loads(process.communicate()[0]) for process in hosts]
    total = {name: sum(each[name] for each in told) for name in told[0]}
    return {
        "tokens": total["tokens"],
        "cpu_us_per_token": 1e6 * total["cpu_s"] / max(total["tokens"], 1),
        "idle_cores": total["idle_cores"],
        "memory_mib": total["memory_mib"],
    }


async def host(count: int, streams: int, seconds: float) -> dict[str, float]:
    """One process: its figures idle and under load."""
    config = ReplicaConfig(engine="simulated", profile=PROFILE, speed=SPEED, per_process=count)
    replicas = [HostedReplica(config, replica_name("", "x", k, count), Reporter("", "", 0.15)) for k in range(count)]
    await asyncio.gather(*(replica.start() for replica in replicas))
    for replica in replicas:
        replica.begin()
    tokens = [0]
    readers = [asyncio.create_task(read(replica, tokens)) for replica in replicas]
    await asyncio.sleep(WARM_S)
    _, idle_s = await spent(IDLE_S, tokens)
    for number, replica in enumerate(replicas):
        asked = [
            Submission(f"{number}-{k}", PROMPT_TOKENS, 0, OUTPUT_TOKENS, Slo(20.0, 0.5), 0.0, OUTPUT_TOKENS, k)
            for k in range(streams)
        ]
        await replica.submit("reader", msgspec.msgpack.encode(asked))
    await asyncio.sleep(WARM_S)
    made, busy_s = await spent(seconds, tokens)
    for task in readers:
        task.cancel()
    for replica in replicas:
        await replica.stop()
    memory_mib = psutil.Process().memory_info().rss / 2**20
    return {"tokens": made, "cpu_s": busy_s, "idle_cores": idle_s / IDLE_S, "memory_mib": memory_mib}


async def spent(seconds: float, tokens: list[int]) -> tuple[int, float]:
    """Tokens made in a window, and this process's processor seconds."""
    before, began_s = tokens[0], time.process_time()
    await asyncio.sleep(seconds)
    return tokens[0] - before, time.process_time() - began_s


async def read(replica: HostedReplica, tokens: list[int]) -> None:
    """Take a replica's messages as an ingress does."""
    async for outputs in replica.outputs("reader"):
        encode_outputs(outputs)
        tokens[0] += sum(len(delta.token_ids) for delta in outputs.deltas)


def headline_of(points: list[dict[str, Any]]) -> dict[str, float]:
    """Medians over the rounds, and how many times as much one process each takes, round by round."""
    few, many = sorted({point["per_process"] for point in points})
    headline: dict[str, float] = {}
    for name in ("cpu_us_per_token", "idle_cores", "memory_mib"):
        alone, shared = ([p[name] for p in points if p["per_process"] == way] for way in (few, many))
        headline[f"{name}_alone"], headline[f"{name}_shared"] = statistics.median(alone), statistics.median(shared)
        headline[f"{name}_ratio"] = statistics.median(a / b for a, b in zip(alone, shared, strict=True))
    return headline


if __name__ == "__main__":
    main()
