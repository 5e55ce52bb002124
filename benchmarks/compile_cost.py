"""CPU seconds that compiling the planning kernels takes at a machine's first start, and which kernels they go to.

    python -m benchmarks.compile_cost [--turns N] [--top N] --json OUT

What `serving.launch.warmup` runs, in a process of its own and into an empty cache, without Ray. A kernel's own seconds
leave out those of the kernels that it calls. They include what it has of theirs: numba optimises a callee again in each
caller.
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

CACHE = "NUMBA_CACHE_DIR"


def main() -> None:
    """Take turns, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3, help="times that everything is compiled")
    parser.add_argument("--top", type=int, default=20, help="kernels to list")
    parser.add_argument("--json", type=Path, help="result file")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(compile_all()))
        return
    from benchmarks.result_file import write_result

    points = []
    for turn in range(options.turns):
        with tempfile.TemporaryDirectory() as empty:
            points.append({"turn": turn, **_child(empty)})
        print({key: value for key, value in points[-1].items() if key != "kernels"}, flush=True)
    for name, own_s, count in points[-1]["kernels"][: options.top]:
        print(f"{own_s:7.2f} s {count:3d} x {name}")
    figures = {
        "compile_cpu_s": statistics.median(point["cpu_s"] for point in points),
        "compiled": points[-1]["compiled"],
    }
    print(figures)
    if options.json:
        config, seeds = {"turns": options.turns}, range(options.turns)
        write_result(options.json, "compile_cost", config=config, seeds=seeds, headline=figures, points=points)


def _child(cache: str) -> dict[str, Any]:
    """Everything compiled once, in a process of its own with the cache of kernels in ``cache``."""
    command = [sys.executable, "-m", "benchmarks.compile_cost", "--one"]
    done = subprocess.run(command, env={**os.environ, CACHE: cache}, stdout=subprocess.PIPE, text=True, check=True)
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


def compile_all() -> dict[str, Any]:
    """CPU seconds of this process, how many kernels were compiled, and of each its own seconds and its signatures."""
    from numba.core import event

    from serving.launch.warmup import warm_up

    class Clock(event.Listener):
        def __init__(self) -> None:
            self.open: list[list[float]] = []  # kernels being compiled: when each began, seconds of those inside
            self.own: dict[str, list[float]] = {}  # seconds and signatures by kernel

        def on_start(self, event: Any) -> None:
            self.open.append([time.process_time(), 0.0])

        def on_end(self, event: Any) -> None:
            began_s, inner_s = self.open.pop()
            taken_s = time.process_time() - began_s
            if self.open:
                self.open[-1][1] += taken_s
            function = event.data["dispatcher"].py_func
            entry = self.own.setdefault(f"{function.__module__}.{function.__qualname__}", [0.0, 0])
            entry[0] += taken_s - inner_s
            entry[1] += 1

    clock = Clock()
    event.register("numba:compile", clock)
    began_s = time.process_time()
    warm_up()
    kernels = sorted(((name, own_s, count) for name, (own_s, count) in clock.own.items()), key=lambda each: -each[1])
    compiled = sum(int(count) for _name, _own_s, count in kernels)
    return {"cpu_s": time.process_time() - began_s, "compiled": compiled, "kernels": kernels}


if __name__ == "__main__":
    main()
