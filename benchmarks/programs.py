"""How long a match takes against known graphs of programs: ``python -m benchmarks.programs --json OUT``.

One sub-request's whole question: super-nodes of its program, similarities to all known graphs, the best of them node by
node, and its outlook. Sizes alternate within one run, so that what else the machine does meets all alike. Then what it
takes to learn one more graph than a history keeps: it is reduced to medoids. That is CPU time of the thread.
"""

import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.result_file import write_result
from controller.programs.history import MOST_GRAPHS, History
from planning.programs.deadlines import StageClock, stage_deadline_s
from planning.programs.graph import NODE, Nodes, complete_stages, to_stages
from planning.programs.matching import Prefix

SIZES, STAGES, WIDTH, ROUNDS = (10, 100, 500), 24, 3, 200
SEED, REDUCTIONS = 1, 5


def graph(rng: np.random.Generator, stages: int) -> Nodes:
    """Stages of one to ``WIDTH`` sub-requests."""
    which = np.repeat(np.arange(stages), rng.integers(1, WIDTH + 1, stages))
    nodes = np.zeros(len(which), dtype=NODE)
    nodes["stage"], nodes["begin_s"] = which, 3.0 * which
    nodes["end_s"] = nodes["begin_s"] + rng.uniform(0.5, 2.0, len(which))
    nodes["input_tokens"] = nodes["fresh_tokens"] = rng.lognormal(7.0, 1.0, len(which))
    nodes["output_tokens"] = rng.lognormal(5.0, 1.0, len(which))
    return nodes


def question_s(history: History, nodes: Nodes) -> float:
    """Seconds of one question about a program under way."""
    started_s = time.perf_counter()
    match = history.match(nodes, Prefix(to_stages(nodes), complete_stages(nodes)))
    seen = history.outlook(match, int(nodes["stage"][-1]), 0.01, 1e-4)
    clock = StageClock(200.0, float(nodes["begin_s"][-1]), 0.0)
    stage_deadline_s(seen.within(clock), clock)
    return time.perf_counter() - started_s


def reduction_ms(rng: np.random.Generator) -> float:
    """Milliseconds of CPU time to learn one more graph than a history keeps."""
    history = History()
    for _ in range(MOST_GRAPHS):
        history.learn(graph(rng, int(rng.integers(3, STAGES + 1))), 0.0)
    nodes, started_s = graph(rng, STAGES), time.thread_time()
    history.learn(nodes, 0.0)
    return 1000.0 * (time.thread_time() - started_s)


def headline(points: list[dict[str, Any]]) -> dict[str, float]:
    """A match against the most graphs."""
    most = points[-1]
    return {f"match_ms_{most['graphs']}": most["median_ms"], f"match_ms_p99_{most['graphs']}": most["p99_ms"]}


def main(
    json: Annotated[Path | None, typer.Option(help="where to write the result")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="a fifth of the questions")] = False,
) -> None:
    """Measure and print; write the result where asked."""
    rounds = ROUNDS // 5 if quick else ROUNDS
    rng, histories = np.random.default_rng(SEED), {}
    for size in SIZES:
        histories[size] = History()
        for _ in range(size):
            histories[size].learn(graph(rng, int(rng.integers(3, STAGES + 1))), 0.0)
    own = [graph(rng, int(rng.integers(1, STAGES))) for _ in range(rounds)]
    for nodes in own:
        nodes["end_s"][nodes["stage"] == nodes["stage"].max()] = np.inf
    took: dict[int, list[float]] = {size: [] for size in SIZES}
    for nodes in own:
        for size in SIZES:
            took[size].append(1000.0 * question_s(histories[size], nodes))
    points: list[dict[str, Any]] = []
    for size, times_ms in took.items():
        p99 = float(np.percentile(times_ms, 99))
        points.append({"graphs": size, "median_ms": statistics.median(times_ms), "p99_ms": p99})
        print(f"{size:4} graphs: median {points[-1]['median_ms']:.3f} ms, P99 {p99:.3f} ms")
    reductions_ms = [reduction_ms(rng) for _ in range(REDUCTIONS)]
    print(f"reduction of {MOST_GRAPHS} graphs: {min(reductions_ms):.1f} to {max(reductions_ms):.1f} ms of CPU time")
    if json is not None:
        told = headline(points) | {"reduction_ms": statistics.median(reductions_ms)}
        config = {"sizes": SIZES, "stages": STAGES, "width": WIDTH, "rounds": rounds}
        write_result(json, "programs-matching", config=config, seeds=[SEED], headline=told, points=points)


if __name__ == "__main__":
    typer.run(main)
